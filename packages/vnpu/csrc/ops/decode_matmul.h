#pragma once

// Products of few bfloat16 rows with a weight whose columns lie dense in memory ([columns, depth],
// as a linear layer stores it and hands it over transposed). ATen's library rearranges the weight
// on every call, which for the few rows of a decode step costs as much as the product itself; here
// the weight is read where it lies. Accumulates in float32, rounds once.

#include <ATen/core/Tensor.h>

namespace vnpu::ops {

// rows [m, depth] @ weight [depth, n] (+ bias [n], undefined for none) -> out [m, n]. Returns
// false, having done nothing, when the CPU or the operands are not made for it: the caller then
// multiplies with ATen.
bool decode_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& out);

}  // namespace vnpu::ops
