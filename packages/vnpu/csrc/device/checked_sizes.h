#pragma once

// Sums and products of sizes that come from outside: from programs, other processes, settings.
// Overflow is an error; results never wrap around.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>

#include "device/failure.h"

namespace vnpu {

[[noreturn]] inline void refuse_size(const char* what, FailureKind kind) {
  throw Failure(kind, std::string("vnpu: ") + what +
                          " does not fit into 64 bits. Look at the sizes, counts and strides that "
                          "the call was given.");
}

// `what` names the result in errors: "the size of an allocation".
template <std::integral T>
T checked_add(T a, T b, const char* what, FailureKind kind = FailureKind::kInvalidArgument) {
  T sum;
  if (__builtin_add_overflow(a, b, &sum)) refuse_size(what, kind);
  return sum;
}

template <std::integral T>
T checked_multiply(T a, T b, const char* what, FailureKind kind = FailureKind::kInvalidArgument) {
  T product;
  if (__builtin_mul_overflow(a, b, &product)) refuse_size(what, kind);
  return product;
}

// Assumes that the value is far below the type's maximum.
constexpr size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

inline size_t checked_round_up(size_t value, size_t step, const char* what,
                               FailureKind kind = FailureKind::kInvalidArgument) {
  return checked_add(value, step - 1, what, kind) / step * step;
}

// True if [begin, begin + bytes) lies within [outer, outer + outer_bytes), which does not wrap
// around.
constexpr bool lies_within(uintptr_t begin, size_t bytes, uintptr_t outer, size_t outer_bytes) {
  return begin >= outer && begin - outer <= outer_bytes && bytes <= outer_bytes - (begin - outer);
}

}  // namespace vnpu
