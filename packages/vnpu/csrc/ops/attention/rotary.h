#pragma once

#include "ops/attention/rotary_rows.h"
#include "ops/operator.h"

namespace vnpu::ops {

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
