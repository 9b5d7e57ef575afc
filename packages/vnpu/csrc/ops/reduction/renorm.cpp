// Slices whose norm is above a limit are scaled down to it.

#include "ops/dtype_lists.h"
#include "ops/operator.h"

namespace vnpu::ops {
namespace {

// As torch.renorm, which takes no p of 0, the number of elements that are not 0.
Tensor renormed(const Tensor& self, const Scalar& p, int64_t dim, const Scalar& max_norm) {
  require(p.toDouble() >= 0, "p must not be negative.");
  require(max_norm.toDouble() >= 0, "maxNorm must not be negative.");
  const Tensor values = widen(self);
  std::vector<int64_t> others;
  for (int64_t each = 0; each < values.dim(); ++each) {
    if (each != (dim < 0 ? dim + values.dim() : dim)) others.push_back(each);
  }
  const Tensor norms = at::linalg_vector_norm(values, p, others, /*keepdim=*/true);
  constexpr double kLeast = 1e-7;  // added to divisors, as ATen and CANN do
  const Tensor factors = at::where(norms > max_norm, max_norm.toDouble() / (norms + kLeast),
                                   at::ones({}, norms.options()));
  return values * factors;
}

Allowed allowed_renorm() {
  static constexpr char kSource[] =
      "CheckDtypeValid, CheckRenormShape in aclnn_renorm.cpp of ops-nn";
  return {.rows = {
              {"self", dtype(kFloats), kSource},
              {"self", dims(2, 8), kSource},
              {"out", same_dtype("self"), kSource},
              {"out", same_sizes("self"), kSource},
          }};
}

}  // namespace

VNPU_OPERATOR(Renorm,
              (const Tensor& self, const Scalar& p, int64_t dim, const Scalar& max_norm, Out out),
              {.cost = elements<4>, .allowed = allowed_renorm}) {
  store(out, renormed(self, p, dim, max_norm));
}
VNPU_OPERATOR(InplaceRenorm, (InOut self, const Scalar& p, int64_t dim, const Scalar& max_norm),
              {.cost = elements<4>}) {
  store(self, renormed(self.tensor, p, dim, max_norm));
}
VNPU_OPERATOR(EmbeddingRenorm,
              (InOut self, const Tensor& indices, double max_norm, double norm_type),
              {.cost = elements<4>}) {
  Tensor rows = widen(self.tensor).clone();
  at::embedding_renorm_(rows, indices.to(at::kLong).reshape({-1}), max_norm, norm_type);
  store(self, rows);
}

}  // namespace vnpu::ops
