#pragma once

// Rows times one block of a weight (blocked_weights.h), on processors for which oneDNN has no such
// kernel. Each element of the result is one chain of multiply-adds over the whole depth, so it does
// not depend on how many rows there are.

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace vnpu::ops {

// Strides count elements. columns: a multiple of 16, and the stride of block and sums.
struct BlockProduct {
  int64_t rows, columns, depth, row_stride;
};

void multiply_block(const BlockProduct& product, const float* rows, const float* block,
                    float* sums);
// The block holds pairs of rows, so the depth is even.
void multiply_block(const BlockProduct& product, const at::BFloat16* rows,
                    const at::BFloat16* block, float* sums);

}  // namespace vnpu::ops
