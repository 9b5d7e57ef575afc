#pragma once

#include "ops/operator.h"

namespace vnpu::ops {

enum class Pairing : int64_t {  // the values that aclnnRotaryPositionEmbedding takes as `mode`
  kHalf = 0,                    // (i, i + d/2)
  kInterleave = 1,              // (2i, 2i + 1)
  kQuarter = 2,                 // halves of each half
  kInterleaveHalf = 3,          // reads (2i, 2i + 1), writes (i, i + d/2)
};

// cos and sin hold one angle per element of the rotated part, or, `one_per_pair`, one per pair.
struct Angles {
  const Tensor& cos;
  const Tensor& sin;
  bool one_per_pair;
};

// x, out: [..., d] with at most four dimensions; angles broadcast over all but the last dimension.
// A rotated part that is narrower than d leaves the rest of the row as it is. out may be x.
void rotate(const Tensor& x, const Angles& angles, Pairing pairing, const Tensor& out);

}  // namespace vnpu::ops
