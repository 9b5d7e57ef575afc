#pragma once

// Products of few bfloat16 rows with a weight that is dense along its columns ([columns, depth], as
// a linear layer stores it and hands it over transposed) or along its rows ([depth, columns], as
// experts and heads have theirs). ATen's library rearranges the weight on every call and prepares
// each product anew, which for the few rows of a decode step costs more than the product itself;
// here the weight is read where it lies. Accumulates in float32, rounds once.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace vnpu::ops {

// rows [m, depth] @ weight [depth, n] (+ bias [n]) -> out [m, n]. Strides count elements; rows and
// out are dense within a row.
struct DecodeProduct {
  const at::BFloat16* rows;
  int64_t row_stride;
  const at::BFloat16* weight;
  int64_t depth_stride;   // from one row of the weight to the next,
  int64_t column_stride;  // from one column to the next: one of the two is 1
  const at::BFloat16* bias = nullptr;
  at::BFloat16* out;
  int64_t out_stride;
  int64_t m;
  int64_t n;
  int64_t depth;
};

// Whether the CPU and these sizes and strides are made for it.
bool is_decode_product(const DecodeProduct& product);
// All of them, divided among ATen's threads together. Every one is a decode product.
void decode_products(c10::ArrayRef<DecodeProduct> products);

// rows [m, depth] @ weight [depth, n] (+ bias [n], undefined for none) -> out [m, n]. Returns
// false, having done nothing, when the CPU or the operands are not made for it: the caller then
// multiplies with ATen.
bool decode_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& out);

// The same for a batch of each: [b, m, depth] @ [b, depth, n] -> [b, m, n].
bool decode_batch_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& out);

}  // namespace vnpu::ops
