#pragma once

// How an operator is written: one row declares it, and its body computes,
//
//   VNPU_OPERATOR(Add, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out),
//                 {.cost = elements<1>, .rules = {...}}) {
//     store(out, at::add(self, other, alpha));
//   }
//
// Nothing else is needed: the library exports aclnnAddGetWorkspaceSize, with exactly
// these arguments in this order, and aclnnAdd. What the declaration says is in ops/declaration.h.
// The parameter types (ops/values.h) say what crosses the C interface and whether memory is read or
// written; checks of addresses, capture, streams and (in time) cost follow from them. The body runs
// when the stream reaches it, possibly often (graph replay), on CPU tensors over the device's
// memory, in inference mode. It computes with ATen; it must not keep references to its arguments.

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "device/failure.h"
#include "device/task.h"
#include "ops/argument_value.h"
#include "ops/arguments.h"
#include "ops/declaration.h"

struct aclOpExecutor;

namespace vnpu::ops {

// --- for bodies --------------------------------------------------------------------------------
// Writes a result: casts to the output's dtype and broadcasts to its shape.
void store(const Tensor& out, const Tensor& result);
inline void store(const Out& out, const Tensor& result) { store(out.tensor, result); }
inline void store(const InOut& out, const Tensor& result) { store(out.tensor, result); }
inline void store(const OptionalOut& out, const Tensor& result) {
  if (out.tensor.has_value()) store(*out.tensor, result);
}
// Refuses arguments: throws Failure(kOperatorInvalid) "aclnnX: message".
[[noreturn]] void refuse(const std::string& message);
inline void require(bool condition, const char* message) {
  if (!condition) refuse(message);
}
// fp32 for 16-bit floats, the tensor's own dtype otherwise: the accumulator of reductions, norms
// and matrix products.
Tensor widen(const Tensor& tensor);
// A scalar as an operand that promotes like a Python number: by its category only.
Tensor number(const Scalar& scalar);

// --- machinery ---------------------------------------------------------------------------------
class Constraints;  // ops/constraints.cpp
// Refuses a call that the documents refuse, as Failure; returns the bytes of workspace that it asks
// for. constraints: those of the operator
uint64_t check(const Operator& op, const Constraints* constraints, const ArgumentValue* arguments);

// The work of a call, for the timing model; null if the operator's row has no cost.
std::shared_ptr<const timing::Work> work_of(const Operator& op, const ArgumentValue* values,
                                            const Touched& touched);

// An operator with its arguments, ready to run any number of times.
class OperatorTask : public Task {
 public:
  using Task::Task;

 protected:
  Progress advance() final;
  virtual void run() = 0;
};

// Ends phase one: returns the task to the caller as an executor.
void finish_prepare(TaskPtr task, uint64_t needed, uint64_t* workspace_bytes,
                    aclOpExecutor** executor);
// Phase two of every operator.
int launch(void* workspace, uint64_t workspace_bytes, aclOpExecutor* executor, void* stream);
// Turns the exception in flight into a status and the recent error text.
int report_exception(const char* name);

// The first phase's knowledge of an operator's parameters. The code that reads, checks and keeps
// arguments is compiled once, for all operators: see CallTask in operator.cpp.
struct Parameters {
  const ArgumentType* const* types;
  size_t count;
  void (*run)(KeptArguments kept);
};
// arguments: where each C argument lies
int prepare_call(const Operator& op, const Parameters& parameters, const void* const* arguments,
                 uint64_t* workspace_bytes, aclOpExecutor** executor);

// An operator's first phase: its C function. Small, as there is one for each operator.
template <auto kBody, const Operator* kOperator>
struct FirstPhase;
template <class... P, void (*kBody)(P...), const Operator* kOperator>
struct FirstPhase<kBody, kOperator> {
  // A constructor, because braces fix the order of evaluation: arguments become tensors from left
  // to right.
  struct Run {
    explicit Run(P... p) { kBody(std::forward<P>(p)...); }
  };
  static void run(KeptArguments kept) { Run{kept.next<std::remove_cvref_t<P>>()...}; }

  static int prepare(typename Argument<std::remove_cvref_t<P>>::C... c, uint64_t* workspace_bytes,
                     aclOpExecutor** executor) {
    static constexpr const ArgumentType* types[] = {&kArgumentType<std::remove_cvref_t<P>>...};
    static constexpr Parameters parameters = {types, sizeof...(P), &run};
    const void* const arguments[] = {&c...};
    return prepare_call(*kOperator, parameters, arguments, workspace_bytes, executor);
  }
};

// The address of a C function whose signature follows from the body's parameters.
using Address = void (*)();

}  // namespace vnpu::ops

// The argument as text, after expanding macros in it.
#define VNPU_SPELLED(...) #__VA_ARGS__

// Exports a C function. The symbol is an indirect function: the loader asks a resolver for the
// address, which lets the C signature follow from the row instead of being written a second time.
#define VNPU_SYMBOL(SYMBOL, ...)                                                   \
  extern "C" {                                                                     \
  __attribute__((used)) static Address resolve_##SYMBOL() {                        \
    return reinterpret_cast<Address>(__VA_ARGS__);                                 \
  }                                                                                \
  __attribute__((visibility("default"), ifunc("resolve_" #SYMBOL))) void SYMBOL(); \
  }

// Exports both phases. PHASE: template of the first phase.
#define VNPU_PHASES(PHASE, NAME)                                         \
  VNPU_SYMBOL(aclnn##NAME##GetWorkspaceSize,                             \
              &PHASE<&vnpu_body_##NAME, &vnpu_operator_##NAME>::prepare) \
  VNPU_SYMBOL(aclnn##NAME, &launch)

// A row, inside namespace vnpu::ops. Behind the parameters: its Declaration, in braces.
#define VNPU_OPERATOR(NAME, PARAMETERS, ...)                                          \
  static void vnpu_body_##NAME PARAMETERS;                                            \
  static const Operator vnpu_operator_##NAME("aclnn" #NAME, VNPU_SPELLED(PARAMETERS), \
                                             [] { return Declaration __VA_ARGS__; }); \
  VNPU_PHASES(FirstPhase, NAME)                                                       \
  static void vnpu_body_##NAME PARAMETERS

// For an operator that also has aclnnNAMEGetMaxWorkspaceSize, with the arguments of
// GetWorkspaceSize.
#define VNPU_MAX_WORKSPACE(NAME)                \
  VNPU_SYMBOL(aclnn##NAME##GetMaxWorkspaceSize, \
              &FirstPhase<&vnpu_body_##NAME, &vnpu_operator_##NAME>::prepare)
