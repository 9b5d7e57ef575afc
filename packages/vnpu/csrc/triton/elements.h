#pragma once

// Arithmetic of kernels on elements, without a branch per element where that is possible.
//
// Integers wrap. Division by zero gives 0, INT_MIN / -1 gives INT_MIN: masked lanes must not trap.
// Shifts by the width or more give 0, or the sign. Floats out of an integer's range become its
// nearest value, NaN 0. 16-bit floats are computed in float32 and rounded after each operation.
// Nothing is contracted. Division, roots and fma are correctly rounded; exp, log, sines and the
// like are the C library's.

#include <cstddef>
#include <cstdint>

#include "triton/program.h"

namespace vnpu::triton {

struct Operand {
  const std::byte* data;
  Type type;
};

// Computes `count` elements of an element-wise operation. attribute: predicate of a comparison,
// bytes of what a pointer points to, or whether a clamp keeps NaN.
void compute(Operation operation, int64_t attribute, std::byte* out, Type type, const Operand* in,
             size_t count);

// Writes one value `count` times. `value`: bytes of the element.
void fill(std::byte* out, size_t bytes, const std::byte* value, size_t count);

// Elements as float32: of 16 or 8 bits, and float32 itself.
void widen(float* out, const Operand& in, size_t count);

// out[m, n] += left[m, k] right[k, n], each element's sum in one chain over k.
template <class T>
void multiply(T* out, const T* left, const T* right, size_t m, size_t n, size_t k);

}  // namespace vnpu::triton
