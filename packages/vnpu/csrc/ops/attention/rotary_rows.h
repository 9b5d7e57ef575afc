#pragma once

// One row of rotary position embedding: the loop, apart from ATen, so that it is built for speed.

#include <cstdint>

namespace vnpu::ops {

enum class Pairing : int64_t {  // the values that aclnnRotaryPositionEmbedding takes as `mode`
  kHalf = 0,                    // (i, i + d/2)
  kInterleave = 1,              // (2i, 2i + 1)
  kQuarter = 2,                 // halves of each half
  kInterleaveHalf = 3,          // reads (2i, 2i + 1), writes (i, i + d/2)
};

// Rotates x[0, width) into out[0, width), which may be x: float32 inside, rounded once.
// cos, sin: one angle per element, or, `one_per_pair`, one per pair. width is even, in quarter mode
// a multiple of 4. turned: room for `width` numbers.
// T: float, double, at::Half or at::BFloat16. A: T or float.
template <class T, class A>
void rotate_row(const T* x, const A* cos, const A* sin, bool one_per_pair, Pairing pairing,
                int64_t width, float* turned, T* out);

}  // namespace vnpu::ops
