#include "ops/attention/rotary_rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace vnpu::ops {
namespace {

struct Pair {
  int64_t a, b, p, q;
};

Pair pair(Pairing pairing, int64_t i, int64_t width) {
  const int64_t half = width / 2;
  const int64_t quarter = width / 4;
  switch (pairing) {
    case Pairing::kHalf: return {i, i + half, i, i + half};
    case Pairing::kInterleave: return {2 * i, 2 * i + 1, 2 * i, 2 * i + 1};
    case Pairing::kQuarter: {
      const int64_t a = i / quarter * half + i % quarter;
      return {a, a + quarter, a, a + quarter};
    }
    case Pairing::kInterleaveHalf: return {2 * i, 2 * i + 1, i, i + half};
  }
  return {};
}

template <class T, class A>
void turn_row(const T* x, const A* cos, const A* sin, bool one_per_pair, Pairing pairing,
              int64_t width, float* turned) {
  const int64_t half = width / 2;
  if (pairing ==
      Pairing::kHalf) {  // the loop without index arithmetic, which the compiler vectorizes
    const int64_t second = one_per_pair ? 0 : half;
    for (int64_t i = 0; i < half; ++i) {
      const float a = static_cast<float>(x[i]);
      const float b = static_cast<float>(x[i + half]);
      turned[i] = a * static_cast<float>(cos[i]) - b * static_cast<float>(sin[i]);
      turned[i + half] =
          b * static_cast<float>(cos[i + second]) + a * static_cast<float>(sin[i + second]);
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const Pair at = pair(pairing, i, width);
    const int64_t p = one_per_pair ? i : at.p;
    const int64_t q = one_per_pair ? i : at.q;
    const float a = static_cast<float>(x[at.a]);
    const float b = static_cast<float>(x[at.b]);
    turned[at.p] = a * static_cast<float>(cos[p]) - b * static_cast<float>(sin[p]);
    turned[at.q] = b * static_cast<float>(cos[q]) + a * static_cast<float>(sin[q]);
  }
}

}  // namespace

template <class T, class A>
void rotate_row(const T* x, const A* cos, const A* sin, bool one_per_pair, Pairing pairing,
                int64_t width, float* turned, T* out) {
  turn_row(x, cos, sin, one_per_pair, pairing, width, turned);
  for (int64_t i = 0; i < width; ++i) out[i] = static_cast<T>(turned[i]);
}

#define VNPU_ROTATE_ROW(T, A) \
  template void rotate_row(const T*, const A*, const A*, bool, Pairing, int64_t, float*, T*);
VNPU_ROTATE_ROW(float, float)
VNPU_ROTATE_ROW(double, double)
VNPU_ROTATE_ROW(double, float)
VNPU_ROTATE_ROW(at::Half, at::Half)
VNPU_ROTATE_ROW(at::Half, float)
VNPU_ROTATE_ROW(at::BFloat16, at::BFloat16)
VNPU_ROTATE_ROW(at::BFloat16, float)

}  // namespace vnpu::ops
