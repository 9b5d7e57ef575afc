// Products and inverses of small matrices and vectors, in fp32.

#include "ops/operator.h"

namespace vnpu::ops {

VNPU_OPERATOR(LinalgCross, (const Tensor& self, const Tensor& other, int64_t dim, Out out),
              {.tier = kOther, .cost = elements<2>}) {
  store(out, at::linalg_cross(self, other, dim));
}
VNPU_OPERATOR(Inverse, (const Tensor& self, Out out),
              {.tier = kOther, .cost = elements_on_ai_cpu<64>}) {
  store(out, at::inverse(widen(self)));
}
// compute_mode chooses a way to compute, not a result.
VNPU_OPERATOR(Cdist, (const Tensor& x1, const Tensor& x2, float p, int64_t, Out out),
              {.tier = kOther, .cost = elements_on_ai_cpu<64>}) {
  store(out, at::cdist(widen(x1), widen(x2), p));
}

}  // namespace vnpu::ops
