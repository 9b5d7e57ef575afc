#pragma once

// The paged or dense caches of multi-head latent attention: of the latent and of the rotary part.

#include "ops/operator.h"

namespace vnpu::ops {

// Destination of rows: cache modes differ in the unit of an index and in the layout of a block.
struct LatentCacheTarget {
  Text mode;
  Tensor index;     // of tokens, or of the slots at which blocks begin in the BLK modes
  int64_t batches;  // rows are [batches * tokens, size]
  int64_t tokens;
};

// rows [batches * tokens, size], of the cache's dtype.
void write_latent_cache(const Tensor& rows, const Tensor& cache, const LatentCacheTarget& target);

// Rows for a cache: in its dtype, quantized as round(x * scale + offset) when that is int8.
Tensor for_cache(const Tensor& rows, const Tensor& cache, const OptionalTensor& scale,
                 const OptionalTensor& offset);

}  // namespace vnpu::ops
