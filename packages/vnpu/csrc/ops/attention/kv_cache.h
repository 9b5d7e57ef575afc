#pragma once

#include <vector>

#include "ops/operator.h"

namespace vnpu::ops {

// How a paged cache lies in memory: a token's row in one piece, or in pieces of 32 bytes that lie
// apart.
enum class CacheMode { kNorm, kPieces };

// Writes rows [tokens, ...] to the slots [tokens] of a paged cache; tokens with a negative slot
// have none. `heads_first`: the cache is [blocks, heads, block_size, size].
void write_slots(const Tensor& rows, const Tensor& cache, const Tensor& slots, CacheMode mode,
                 bool heads_first);

// The integers of a tensor, row by row.
std::vector<int64_t> host_values(const Tensor& tensor);

}  // namespace vnpu::ops
