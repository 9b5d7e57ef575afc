#pragma once

// Products of rows with a weight, through those of oneDNN's block kernels that libtorch_cpu exports
// (at::native::cpublas::brgemm): with AMX tiles where the processor has them, else with AVX-512. On
// other processors through our own (block_kernel.h).
//
// ATen's own products go through oneDNN too, but rearrange the weight on every call and prepare
// each product anew, which for the few rows of a decode step costs more than the product. Here the
// weight is rearranged once (blocked_weights.h). Work is divided among threads by columns, and an
// element's sum runs over the whole depth in one chain: a row's result depends neither on how many
// rows there are nor on how many threads.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "ops/matmul/blocked_weights.h"

namespace vnpu::ops {

// rows [m, weight.depth] @ weight (+ bias [weight.columns]) -> out [m, weight.columns]. All have
// the weight's dtype; rows and out are dense within a row; strides count elements.
struct BlockedProduct {
  const void* rows;
  int64_t row_stride;
  Weight weight;
  const void* bias = nullptr;
  void* out;
  int64_t out_stride;
  int64_t m;
};

// True if the blocked product supports these operands.
bool is_blocked_product(const BlockedProduct& product);
// Computes blocked products of one dtype, divided among ATen's threads together. Returns false if
// oneDNN has no kernel for one of them: the caller then multiplies with ATen.
bool blocked_products(c10::ArrayRef<BlockedProduct> products);

// rows [m, depth] @ weight [depth, n] (+ bias [n], undefined for none) -> out [m, n]. Returns
// false, having done nothing, if it does not support the operands: the caller then multiplies with
// ATen.
bool blocked_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                    const at::Tensor& out);

// The same for a batch of each: [b, m, depth] @ [b, depth, n] -> [b, m, n].
bool blocked_batch_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& out);

// The product of operands of one dtype, [m, depth] @ [depth, n] or a batch of each, as a new
// tensor; for other operands at::matmul's result.
at::Tensor multiply_rows(const at::Tensor& rows, const at::Tensor& weight);

}  // namespace vnpu::ops
