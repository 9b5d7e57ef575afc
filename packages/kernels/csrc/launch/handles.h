#pragma once

// Arguments of the operators' C interface, made from views, lists and numbers.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <vector>

#include "launch/view.h"

struct aclTensor;
struct aclScalar;
struct aclIntArray;
struct aclTensorList;
struct aclOpExecutor;

namespace davinci {

// Handles made for the launches of one stage; destroyed together after the last launch.
class Handles {
 public:
  Handles() = default;
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  ~Handles();

  aclTensor* tensor(const View& view);
  aclTensorList* tensor_list(std::initializer_list<View> views);
  aclIntArray* ints(at::IntArrayRef values);
  aclScalar* scalar(double value);
  aclScalar* scalar(int64_t value);

 private:
  enum class Kind : uint8_t { kTensor, kTensorList, kIntArray, kScalar };
  struct Made {
    void* handle;
    Kind kind;
  };
  template <class T>
  T* keep(T* handle, Kind kind, const char* function);
  std::vector<Made> made_;
};

// Number<T>: a value that is passed as an aclScalar; plain values are passed as they are.
template <class T>
struct Number {
  T value;
};
// A dtype, which is passed as an aclDataType.
struct AclType {
  at::ScalarType dtype;
};
int32_t acl_type(at::ScalarType dtype);
// aclTensorList of the views.
struct Views {
  std::initializer_list<View> views;
};

// Argument<T>::c(handles, value): the value as the C interface takes it.
template <class T>
struct Argument {
  static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, const char*>,
                "wrap what is neither a number nor text");
  static T c(Handles&, T value) { return value; }
};
template <size_t N>
struct Argument<char[N]> {
  static const char* c(Handles&, const char (&text)[N]) { return text; }
};
template <>
struct Argument<View> {
  static aclTensor* c(Handles& handles, const View& view) { return handles.tensor(view); }
};
template <>
struct Argument<at::Tensor> {
  static aclTensor* c(Handles& handles, const at::Tensor& tensor) {
    return handles.tensor(View::of(tensor));
  }
};
template <>
struct Argument<std::optional<View>> {
  static aclTensor* c(Handles& handles, const std::optional<View>& view) {
    return view ? handles.tensor(*view) : nullptr;
  }
};
template <>
struct Argument<std::optional<at::Tensor>> {
  static aclTensor* c(Handles& handles, const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? handles.tensor(View::of(*tensor)) : nullptr;
  }
};
// An argument that already exists and lives until the launch.
template <>
struct Argument<aclTensor*> {
  static aclTensor* c(Handles&, aclTensor* made) { return made; }
};
template <>
struct Argument<aclTensorList*> {
  static aclTensorList* c(Handles&, aclTensorList* made) { return made; }
};
template <>
struct Argument<aclIntArray*> {
  static aclIntArray* c(Handles&, aclIntArray* made) { return made; }
};
template <>
struct Argument<std::nullptr_t> {
  static void* c(Handles&, std::nullptr_t) { return nullptr; }
};
template <>
struct Argument<AclType> {
  static int32_t c(Handles&, AclType type) { return acl_type(type.dtype); }
};
template <>
struct Argument<Views> {
  static aclTensorList* c(Handles& handles, const Views& views) {
    return handles.tensor_list(views.views);
  }
};
template <>
struct Argument<at::IntArrayRef> {
  static aclIntArray* c(Handles& handles, at::IntArrayRef values) { return handles.ints(values); }
};
template <>
struct Argument<at::OptionalIntArrayRef> {
  static aclIntArray* c(Handles& handles, at::OptionalIntArrayRef values) {
    return values.has_value() ? handles.ints(*values) : nullptr;
  }
};
template <class T>
struct Argument<Number<T>> {
  static aclScalar* c(Handles& handles, Number<T> number) { return handles.scalar(number.value); }
};

}  // namespace davinci
