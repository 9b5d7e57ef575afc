#pragma once

// The arguments of a call between its two phases, as rules and costs see them.

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/values.h"

namespace vnpu::ops {

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

}  // namespace vnpu::ops
