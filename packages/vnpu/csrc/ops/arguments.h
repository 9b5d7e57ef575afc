#pragma once

// How the arguments of a row cross the C interface, and how they reach the body.

#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "device/touched.h"
#include "ops/argument_value.h"
#include "ops/values.h"

struct aclScalar;
struct aclIntArray;
struct aclBoolArray;
struct aclTensorList;

namespace vnpu::ops {

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

TypedScalar read_scalar(const aclScalar* scalar);
std::vector<int64_t> read_ints(const aclIntArray* array);
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
template <class T, class Handle, auto kRead>
struct ArrayArgument : PlainArgument<T> {
  using C = const Handle*;
  static T keep(C c, Launch&) { return c == nullptr ? T() : T(kRead(c)); }
};
template <>
struct Argument<IntArray> : ArrayArgument<IntArray, aclIntArray, read_ints> {};
template <>
struct Argument<OptionalIntArray> : ArrayArgument<OptionalIntArray, aclIntArray, read_ints> {};
template <>
struct Argument<BoolArray> : ArrayArgument<BoolArray, aclBoolArray, read_bools> {};
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

// How an argument of one type is stored between the two phases; all operators with such an argument
// share it.
struct ArgumentType {
  size_t bytes;  // of what is kept
  void (*keep)(std::byte* place, const void* argument,
               Launch& launch);  // argument: the C argument's
  ArgumentValue (*value)(const std::byte* place);
  void (*destroy)(std::byte* place);  // null: there is nothing to do
};

// Kept arguments follow each other at this distance: a scalar may hold a complex number.
constexpr size_t kept_bytes(size_t bytes) { return (bytes + 15) / 16 * 16; }

template <class T>
struct KeptArgument {
  using Kept = typename Argument<T>::Kept;
  static_assert(alignof(Kept) <= 16);
  static void keep(std::byte* place, const void* argument, Launch& launch);
  static ArgumentValue value(const std::byte* place);
  static void destroy(std::byte* place);
};
template <class T>
void KeptArgument<T>::keep(std::byte* place, const void* argument, Launch& launch) {
  using C = typename Argument<T>::C;
  new (place) Kept(Argument<T>::keep(*static_cast<const C*>(argument), launch));
}
template <class T>
ArgumentValue KeptArgument<T>::value(const std::byte* place) {
  return value_of(*reinterpret_cast<const Kept*>(place));
}
template <class T>
void KeptArgument<T>::destroy(std::byte* place) {
  reinterpret_cast<Kept*>(place)->~Kept();
}
// Compiled once, in operator.cpp: as much code as all bodies of a file.
// clang-format off
#define VNPU_ARGUMENT_TYPES(X)                                                          \
  X(Tensor) X(OptionalTensor) X(TensorList) X(OptionalTensorList)                       \
  X(Out) X(OptionalOut) X(InOut) X(OptionalInOut) X(WholeOut) X(DynamicOut)             \
  X(OutList) X(OptionalOutList) X(InOutList)                                            \
  X(Scalar) X(OptionalScalar) X(IntArray) X(OptionalIntArray) X(BoolArray)              \
  X(DType) X(Text) X(bool) X(int8_t) X(int32_t) X(int64_t) X(uint64_t) X(float) X(double)
// clang-format on
#define VNPU_DECLARED(T) extern template struct KeptArgument<T>;
VNPU_ARGUMENT_TYPES(VNPU_DECLARED)
#undef VNPU_DECLARED

template <class T>
inline constexpr ArgumentType kArgumentType = {
    kept_bytes(sizeof(typename Argument<T>::Kept)),
    &KeptArgument<T>::keep,
    &KeptArgument<T>::value,
    std::is_trivially_destructible_v<typename Argument<T>::Kept> ? nullptr
                                                                 : &KeptArgument<T>::destroy,
};

// The kept arguments of a call, from the first on, as the body's arguments.
class KeptArguments {
 public:
  KeptArguments(const std::byte* first, Tensors& tensors) : next_(first), tensors_(&tensors) {}
  template <class T>
  decltype(auto) next() {
    using Kept = typename Argument<T>::Kept;
    const Kept& kept = *reinterpret_cast<const Kept*>(next_);
    next_ += kept_bytes(sizeof(Kept));
    return Argument<T>::value(kept, *tensors_);
  }

 private:
  const std::byte* next_;
  Tensors* tensors_;
};

}  // namespace vnpu::ops
