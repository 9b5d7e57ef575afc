#pragma once

// How to write an operator that communicates. Its row states name and arguments as any other's;
// its body runs when the operator is prepared, and makes the task that a stream runs later:
//
//   VNPU_GROUP_OPERATOR(Name, (const TensorIn& x, const Text& group, TensorOut out),
//                       {.tier = kT2, .cost = cost_of_name}) {
//     return std::make_shared<SomeCollective>(..., launch.touched);
//   }
//
// `launch` is in scope. The body refuses arguments with `reject`.

#include <optional>
#include <string>
#include <tuple>

#include "collective/group.h"
#include "ops/operator.h"

namespace vnpu::ops {

// --- argument types: addresses and layouts of tensors, for a task that uses them later
// ------------------------
struct TensorIn {  // aclTensor*, read, required
  TensorView view;
};
struct OptionalTensorIn {  // aclTensor*, read, may be null
  std::optional<TensorView> view;
};
struct TensorOut {  // aclTensor*, written, required
  TensorView view;
};
struct OptionalTensorOut {  // aclTensor*, written, may be null
  std::optional<TensorView> view;
};

template <class T, bool kWrite>
struct RequiredView : PlainArgument<T> {
  using C = const aclTensor*;
  static T keep(C c, Launch& launch) {
    if (c == nullptr) launch.missing();
    return T{launch.view(c, kWrite, !kWrite)};
  }
};
template <class T, bool kWrite>
struct OptionalView : PlainArgument<T> {
  using C = const aclTensor*;
  static T keep(C c, Launch& launch) {
    return c == nullptr ? T{} : T{launch.view(c, kWrite, !kWrite)};
  }
};
template <>
struct Argument<TensorIn> : RequiredView<TensorIn, false> {};
template <>
struct Argument<TensorOut> : RequiredView<TensorOut, true> {};
template <>
struct Argument<OptionalTensorIn> : OptionalView<OptionalTensorIn, false> {};
template <>
struct Argument<OptionalTensorOut> : OptionalView<OptionalTensorOut, true> {};

// Refuses arguments: throws Failure(kOperatorInvalid) "aclnnX: message".
[[noreturn]] void reject(const Launch& launch, const std::string& message);
// The group of that name in which the current device takes part.
GroupPtr group_named(const Launch& launch, const std::string& name);

template <auto kBody, const Operator* kOperator>
struct GroupFirstPhase;
template <class... P, TaskPtr (*kBody)(const Launch&, P...), const Operator* kOperator>
struct GroupFirstPhase<kBody, kOperator> {
  template <class T>
  using A = Argument<std::remove_cvref_t<T>>;

  static int prepare(typename A<P>::C... c, uint64_t* workspace_bytes, aclOpExecutor** executor) {
    try {
      Launch launch{kOperator->name};
      // Braces fix the order of evaluation: arguments are read, and numbered, from left to right.
      std::tuple<typename A<P>::Kept...> kept{A<P>::keep(c, launch.next())...};
      uint64_t needed = 0;
      const auto body = [&](const auto&... values) {
        const ArgumentValue seen[] = {value_of(values)..., {}};
        needed = check(*kOperator, kOperator->constraints(), seen);
        TaskPtr task = kBody(launch, values...);
        if (Task::keeps_work) task->work = work_of(*kOperator, seen, task->touched);
        return task;
      };
      finish_prepare(std::apply(body, kept), needed, workspace_bytes, executor);
      return 0;
    } catch (...) {
      return report_exception(kOperator->name);
    }
  }
};

}  // namespace vnpu::ops

#define VNPU_UNWRAP(...) __VA_ARGS__
#define VNPU_GROUP_OPERATOR(NAME, PARAMETERS, ...)                                    \
  static TaskPtr vnpu_body_##NAME(const Launch& launch, VNPU_UNWRAP PARAMETERS);      \
  static const Operator vnpu_operator_##NAME("aclnn" #NAME, VNPU_SPELLED(PARAMETERS), \
                                             [] { return Declaration __VA_ARGS__; }); \
  VNPU_PHASES(GroupFirstPhase, NAME)                                                  \
  static TaskPtr vnpu_body_##NAME(const Launch& launch, VNPU_UNWRAP PARAMETERS)
