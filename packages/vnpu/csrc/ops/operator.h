#pragma once

// How an operator is written: one row states name, arguments and implementation,
//
//   VNPU_OPERATOR(Add, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out)) {
//     store(out, at::add(self, other, alpha));
//   }
//
// With its line in abi/opapi/operators.inc it is aclnnAddGetWorkspaceSize, with exactly these
// arguments in this order, and aclnnAdd.
// The parameter types below say what crosses the C interface and whether memory is read or written;
// checks of addresses, capture, streams and (in time) cost follow from them. The body runs when the
// stream reaches it, possibly often (graph replay), on CPU tensors over the device's memory, in
// inference mode. It computes with ATen; it must not keep references to its arguments.

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "device/failure.h"
#include "device/task.h"
#include "ops/tensor_view.h"

struct aclTensor;
struct aclScalar;
struct aclIntArray;
struct aclFloatArray;
struct aclBoolArray;
struct aclTensorList;
struct aclScalarList;
struct aclOpExecutor;

namespace vnpu::ops {

using at::Scalar;
using at::ScalarType;
using at::Tensor;

// --- argument types of an operator -----------------------------------------------------------
//   const Tensor&                    aclTensor*, read, required
//   const OptionalTensor&            aclTensor*, read, may be null
//   Out                              aclTensor*, written, required
//   OptionalOut                      aclTensor*, written, may be null
//   InOut                            aclTensor*, read and written, required
//   OptionalInOut                    aclTensor*, read and written, may be null
//   WholeOut                         aclTensor*, written, required; also says where it lies
//   DynamicOut                       aclTensor*, written, its shape is decided by the operator
//   const TensorList&, const OptionalTensorList&   aclTensorList*, read (null = empty)
//   const OutList&, const OptionalOutList&         aclTensorList*, written (null = empty)
//   const InOutList&                 aclTensorList*, read and written
//   const Scalar&                    aclScalar*, required
//   const OptionalScalar&            aclScalar*, may be null
//   const ScalarList&                aclScalarList*
//   const IntArray&                  aclIntArray*, null = empty
//   const OptionalIntArray&          aclIntArray*, null = nullopt
//   const FloatArray&, const BoolArray&            null = empty
//   DType                            aclDataType by value
//   const Text&                      char*, null = ""
//   bool, int8_t, int32_t, int64_t, uint64_t, float, double   by value

using OptionalTensor = std::optional<Tensor>;
struct Out {
  Tensor tensor;
};
struct InOut {
  Tensor tensor;
};
struct WholeOut {
  Tensor tensor;
  TensorView view;
};
struct OptionalOut {
  std::optional<Tensor> tensor;
  explicit operator bool() const { return tensor.has_value(); }
};
struct OptionalInOut {
  std::optional<Tensor> tensor;
  explicit operator bool() const { return tensor.has_value(); }
};
struct DynamicOut {
  Tensor tensor;  // with the sizes that the caller allocated (an upper bound)
  aclTensor* handle = nullptr;
  // Writes `result` (row-major) to the front of the memory and reports its sizes to the caller.
  void set(const Tensor& result) const;
};
struct TensorList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct OptionalTensorList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct OutList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct OptionalOutList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
struct InOutList : std::vector<Tensor> {
  using std::vector<Tensor>::vector;
};
using OptionalScalar = std::optional<Scalar>;
using ScalarList = std::vector<Scalar>;
using IntArray = std::vector<int64_t>;
using OptionalIntArray = std::optional<std::vector<int64_t>>;
using FloatArray = std::vector<float>;
struct BoolArray : std::vector<bool> {
  using std::vector<bool>::vector;
};
struct DType {
  ScalarType type;
};
using Text = std::string;

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

// --- machinery: crossing from C arguments to the body -----------------------------------------
// Collects what a launch needs while its C arguments are read.
struct Launch {
  const char* name;  // "aclnnAdd"
  int position = 0;  // of the argument being read, from 1
  Touched touched = {};
  Launch& next() {
    ++position;
    return *this;
  }
  TensorView view(const aclTensor* tensor, bool write, bool read);
  std::vector<TensorView> views(const aclTensorList* list, bool write, bool read);
  [[noreturn]] void missing() const;  // a required argument is null
};

// Makes tensors for one run; those that lie in one storage share an at::Storage.
class Tensors {
 public:
  Tensor make(const TensorView& view);
  template <class List>
  List make_list(const std::vector<TensorView>& views) {
    List list;
    list.reserve(views.size());
    for (const TensorView& view : views) list.push_back(make(view));
    return list;
  }

 private:
  std::vector<std::pair<void*, Tensor>> made_;
};

// A number with the dtype that it crossed the interface in.
struct TypedScalar {
  Scalar value;
  ScalarType dtype = at::kDouble;
};

TypedScalar read_scalar(const aclScalar* scalar);
std::vector<Scalar> read_scalars(const aclScalarList* list);
std::vector<int64_t> read_ints(const aclIntArray* array);
std::vector<float> read_floats(const aclFloatArray* array);
BoolArray read_bools(const aclBoolArray* array);
ScalarType read_dtype(int32_t acl_data_type);

// Argument<T>: C type, what is kept between the two phases, and the value that the body gets.
template <class T>
struct Argument;

template <>
struct Argument<Tensor> {
  using C = const aclTensor*;
  using Kept = TensorView;
  static Kept keep(C c, Launch& launch) {
    if (c == nullptr) launch.missing();
    return launch.view(c, false, true);
  }
  static Tensor value(const Kept& kept, Tensors& tensors) { return tensors.make(kept); }
};
template <>
struct Argument<OptionalTensor> {
  using C = const aclTensor*;
  using Kept = std::optional<TensorView>;
  static Kept keep(C c, Launch& launch) {
    return c == nullptr ? Kept() : Kept(launch.view(c, false, true));
  }
  static OptionalTensor value(const Kept& kept, Tensors& tensors) {
    return kept ? OptionalTensor(tensors.make(*kept)) : OptionalTensor();
  }
};
template <class T, bool kRead>
struct WrittenArgument {
  using C = const aclTensor*;
  using Kept = TensorView;
  static Kept keep(C c, Launch& launch) {
    if (c == nullptr) launch.missing();
    return launch.view(c, true, kRead);
  }
  static T value(const Kept& kept, Tensors& tensors) { return T{tensors.make(kept)}; }
};
template <class T, bool kRead>
struct OptionalWrittenArgument {
  using C = const aclTensor*;
  using Kept = std::optional<TensorView>;
  static Kept keep(C c, Launch& launch) {
    return c == nullptr ? Kept() : Kept(launch.view(c, true, kRead));
  }
  static T value(const Kept& kept, Tensors& tensors) { return kept ? T{tensors.make(*kept)} : T{}; }
};
template <>
struct Argument<Out> : WrittenArgument<Out, false> {};
template <>
struct Argument<InOut> : WrittenArgument<InOut, true> {};
template <>
struct Argument<WholeOut> : WrittenArgument<WholeOut, false> {
  static WholeOut value(const Kept& kept, Tensors& tensors) {
    return WholeOut{tensors.make(kept), kept};
  }
};
template <>
struct Argument<OptionalOut> : OptionalWrittenArgument<OptionalOut, false> {};
template <>
struct Argument<OptionalInOut> : OptionalWrittenArgument<OptionalInOut, true> {};
template <>
struct Argument<DynamicOut> {
  using C = aclTensor*;
  using Kept = std::pair<TensorView, aclTensor*>;
  static Kept keep(C c, Launch& launch) {
    if (c == nullptr) launch.missing();
    return {launch.view(c, true, false), c};
  }
  static DynamicOut value(const Kept& kept, Tensors& tensors) {
    return DynamicOut{tensors.make(kept.first), kept.second};
  }
};
template <class T, bool kWrite, bool kRead, bool kOptional>
struct ListArgument {
  using C = const aclTensorList*;
  using Kept = std::vector<TensorView>;
  static Kept keep(C c, Launch& launch) {
    if (c == nullptr && !kOptional) launch.missing();
    return c == nullptr ? Kept() : launch.views(c, kWrite, kRead);
  }
  static T value(const Kept& kept, Tensors& tensors) { return tensors.make_list<T>(kept); }
};
template <>
struct Argument<TensorList> : ListArgument<TensorList, false, true, false> {};
template <>
struct Argument<OptionalTensorList> : ListArgument<OptionalTensorList, false, true, true> {};
template <>
struct Argument<OutList> : ListArgument<OutList, true, false, false> {};
template <>
struct Argument<OptionalOutList> : ListArgument<OptionalOutList, true, false, true> {};
template <>
struct Argument<InOutList> : ListArgument<InOutList, true, true, false> {};

template <class T>
struct PlainArgument {
  using Kept = T;
  static const T& value(const Kept& kept, Tensors&) { return kept; }
};
template <>
struct Argument<Scalar> {
  using C = const aclScalar*;
  using Kept = TypedScalar;
  static Kept keep(C c, Launch& launch) {
    if (c == nullptr) launch.missing();
    return read_scalar(c);
  }
  static const Scalar& value(const Kept& kept, Tensors&) { return kept.value; }
};
template <>
struct Argument<OptionalScalar> {
  using C = const aclScalar*;
  using Kept = std::optional<TypedScalar>;
  static Kept keep(C c, Launch&) { return c == nullptr ? Kept() : Kept(read_scalar(c)); }
  static OptionalScalar value(const Kept& kept, Tensors&) {
    return kept ? OptionalScalar(kept->value) : OptionalScalar();
  }
};
template <>
struct Argument<ScalarList> : PlainArgument<ScalarList> {
  using C = const aclScalarList*;
  static ScalarList keep(C c, Launch&) { return c == nullptr ? ScalarList() : read_scalars(c); }
};
template <>
struct Argument<IntArray> : PlainArgument<IntArray> {
  using C = const aclIntArray*;
  static IntArray keep(C c, Launch&) { return c == nullptr ? IntArray() : read_ints(c); }
};
template <>
struct Argument<OptionalIntArray> : PlainArgument<OptionalIntArray> {
  using C = const aclIntArray*;
  static OptionalIntArray keep(C c, Launch&) {
    return c == nullptr ? OptionalIntArray() : OptionalIntArray(read_ints(c));
  }
};
template <>
struct Argument<FloatArray> : PlainArgument<FloatArray> {
  using C = const aclFloatArray*;
  static FloatArray keep(C c, Launch&) { return c == nullptr ? FloatArray() : read_floats(c); }
};
template <>
struct Argument<BoolArray> : PlainArgument<BoolArray> {
  using C = const aclBoolArray*;
  static BoolArray keep(C c, Launch&) { return c == nullptr ? BoolArray() : read_bools(c); }
};
template <>
struct Argument<DType> : PlainArgument<DType> {
  using C = int32_t;
  static DType keep(C c, Launch&) { return DType{read_dtype(c)}; }
};
template <>
struct Argument<Text> : PlainArgument<Text> {
  using C = const char*;
  static Text keep(C c, Launch&) { return c == nullptr ? Text() : Text(c); }
};
template <class T>
struct ValueArgument : PlainArgument<T> {
  using C = T;
  static T keep(C c, Launch&) { return c; }
};
template <>
struct Argument<bool> : ValueArgument<bool> {};
template <>
struct Argument<int8_t> : ValueArgument<int8_t> {};
template <>
struct Argument<int32_t> : ValueArgument<int32_t> {};
template <>
struct Argument<int64_t> : ValueArgument<int64_t> {};
template <>
struct Argument<uint64_t> : ValueArgument<uint64_t> {};
template <>
struct Argument<float> : ValueArgument<float> {};
template <>
struct Argument<double> : ValueArgument<double> {};

// --- what constraints look at --------------------------------------------------------------------
// Tensors that lie in a list, at equal distances.
struct ViewSpan {
  const char* first;
  uint32_t count;
  uint32_t distance;
  const TensorView& operator[](size_t index) const {
    return *reinterpret_cast<const TensorView*>(first + index * distance);
  }
};

// One argument of a call, between the two phases.
struct ArgumentValue {
  enum class Kind : uint8_t {
    kAbsent,  // null
    kTensor,
    kTensors,
    kIntegers,
    kInteger,  // bool and aclDataType too
    kReal,
    kScalar,
    kScalars,
    kText,
    kOther,  // nothing that a constraint reads
  };
  Kind kind = Kind::kAbsent;
  union {
    const void* none = nullptr;
    const TensorView* tensor;
    ViewSpan tensors;
    const std::vector<int64_t>* integers;
    int64_t integer;
    double real;
    const TypedScalar* scalar;
    const std::vector<Scalar>* scalars;
    const std::string* text;
  };
};

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <class Kept>
ArgumentValue value_of(const Kept& kept) {
  using Kind = ArgumentValue::Kind;
  if constexpr (kIsOptional<Kept>) {
    return kept ? value_of(*kept) : ArgumentValue{};
  } else if constexpr (std::is_same_v<Kept, TensorView>) {
    return {.kind = Kind::kTensor, .tensor = &kept};
  } else if constexpr (std::is_same_v<Kept, std::vector<TensorView>>) {
    return {.kind = Kind::kTensors,
            .tensors = {reinterpret_cast<const char*>(kept.data()),
                        static_cast<uint32_t>(kept.size()), sizeof(TensorView)}};
  } else if constexpr (requires { kept.data()->first.storage; }) {
    const void* const first = kept.empty() ? nullptr : &kept.data()->first;
    return {.kind = Kind::kTensors,
            .tensors = {static_cast<const char*>(first), static_cast<uint32_t>(kept.size()),
                        sizeof(*kept.data())}};
  } else if constexpr (std::is_same_v<Kept, IntArray>) {
    return {.kind = Kind::kIntegers, .integers = &kept};
  } else if constexpr (std::is_same_v<Kept, TypedScalar>) {
    return {.kind = Kind::kScalar, .scalar = &kept};
  } else if constexpr (std::is_same_v<Kept, ScalarList>) {
    return {.kind = Kind::kScalars, .scalars = &kept};
  } else if constexpr (std::is_same_v<Kept, Text>) {
    return {.kind = Kind::kText, .text = &kept};
  } else if constexpr (std::is_same_v<Kept, DType>) {
    return {.kind = Kind::kInteger, .integer = static_cast<int64_t>(kept.type)};
  } else if constexpr (std::is_integral_v<Kept>) {
    return {.kind = Kind::kInteger, .integer = static_cast<int64_t>(kept)};
  } else if constexpr (std::is_floating_point_v<Kept>) {
    return {.kind = Kind::kReal, .real = static_cast<double>(kept)};
  } else if constexpr (requires { kept.first.storage; }) {
    return value_of(kept.first);
  } else if constexpr (requires { kept.view; }) {
    return value_of(kept.view);
  } else {
    return {.kind = Kind::kOther};
  }
}

class Constraints;  // ops/constraints.h
// The constraints of an operator; null where none are written down, or none are checked.
// parameters: as its row spells them.
const Constraints* constraints_of(const char* name, const char* parameters);
// Refuses a call that the documents refuse, as Failure; returns the bytes of workspace that it asks
// for.
uint64_t check(const Constraints& constraints, const ArgumentValue* arguments);

// What a call has to do, for the timing model; null where the operator's row has no cost. See
// ops/costs.h.
std::shared_ptr<const timing::Work> work_of(const char* name, const char* parameters,
                                            const ArgumentValue* values, const Touched& touched);

// An operator with its arguments, ready to run any number of times.
class OperatorTask : public Task {
 public:
  using Task::Task;

 protected:
  Progress advance() final;
  virtual void run() = 0;
};

// Phase one's end: hands the task to the caller as an executor.
void finish_prepare(TaskPtr task, uint64_t needed, uint64_t* workspace_bytes,
                    aclOpExecutor** executor);
// Turns the exception in flight into a status and the recent error text.
int report_exception(const char* name);

// A literal as a template's argument.
template <size_t kSize>
struct Literal {
  char text[kSize] = {};
  consteval Literal(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }
};

// An operator's first phase: its C function, and the task that it makes of a body.
template <auto kBody, Literal kName, auto kParameters>
struct FirstPhase;
template <class... P, void (*kBody)(P...), Literal kName, auto kParameters>
struct FirstPhase<kBody, kName, kParameters> {
  template <class T>
  using A = Argument<std::remove_cvref_t<T>>;

  class Bound final : public OperatorTask {
   public:
    explicit Bound(typename A<P>::C... c) : Bound(Launch{kName.text}, c...) {}
    uint64_t check_against(const Constraints& constraints) const {
      return std::apply(
          [&](const auto&... kept) {
            const ArgumentValue values[] = {value_of(kept)..., {}};
            return check(constraints, values);
          },
          kept_);
    }

   private:
    // Braces fix the order of evaluation: arguments are read, and numbered, from left to right.
    Bound(Launch&& launch, typename A<P>::C... c)
        : OperatorTask(launch.name), kept_{A<P>::keep(c, launch.next())...} {
      touched = std::move(launch.touched);
      if (!keeps_work) return;
      std::apply(
          [&](const auto&... kept) {
            const ArgumentValue values[] = {value_of(kept)..., {}};
            work = work_of(kName.text, kParameters(), values, touched);
          },
          kept_);
    }
    void run() override { run_with(std::index_sequence_for<P...>()); }
    template <size_t... I>
    void run_with(std::index_sequence<I...>) {
      Tensors tensors;
      // Braces fix the order of evaluation.
      std::tuple<decltype(A<P>::value(std::get<I>(kept_), tensors))...> values{
          A<P>::value(std::get<I>(kept_), tensors)...};
      kBody(std::get<I>(values)...);
    }
    std::tuple<typename A<P>::Kept...> kept_;
  };

  static int prepare(typename A<P>::C... c, uint64_t* workspace_bytes, aclOpExecutor** executor) {
    try {
      static const Constraints* const constraints = constraints_of(kName.text, kParameters());
      auto task = std::make_shared<Bound>(c...);
      const uint64_t needed = constraints == nullptr ? 0 : task->check_against(*constraints);
      finish_prepare(std::move(task), needed, workspace_bytes, executor);
      return 0;
    } catch (...) {
      return report_exception(kName.text);
    }
  }
};

// The address of a C function whose signature follows from the body's parameters.
using Address = void (*)();

}  // namespace vnpu::ops

// Text of a macro's argument, after the macros in it.
#define VNPU_SPELLED(...) #__VA_ARGS__

// Inside namespace vnpu::ops. The symbols that a program finds are in abi/opapi/operators.inc.
#define VNPU_OPERATOR(NAME, PARAMETERS)                                                   \
  static void vnpu_body_##NAME PARAMETERS;                                                \
  static const char* vnpu_parameters_##NAME() { return VNPU_SPELLED(PARAMETERS); }        \
  Address prepare_##NAME();                                                               \
  Address prepare_##NAME() {                                                              \
    return reinterpret_cast<Address>(                                                     \
        &FirstPhase<&vnpu_body_##NAME, "aclnn" #NAME, &vnpu_parameters_##NAME>::prepare); \
  }                                                                                       \
  static void vnpu_body_##NAME PARAMETERS
