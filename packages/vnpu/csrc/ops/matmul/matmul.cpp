// Matrix products. Transposed operands arrive as strided views, which ATen's products take as they
// are. cubeMathType allows the device to lower the precision of float32; here it never does.

#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/declarations.h"
#include "ops/matmul/fractal_layout.h"
#include "ops/operator.h"

namespace vnpu::ops {
namespace {

bool is_floating(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void require_floating(std::initializer_list<Tensor> operands) {
  for (const Tensor& operand : operands) {
    if (!is_floating(operand)) {
      refuse(std::string("the matrix unit multiplies float32, float16 and bfloat16; got ") +
             at::toString(operand.scalar_type()) + ". Convert the operand first.");
    }
  }
}

// Whether ATen may compute straight into `out`: one dtype throughout, and not float16, for which
// ATen has only a scalar loop (widening to float32 is 3 times as fast and as exact).
template <class... T>
bool is_direct(const Tensor& out, const T&... operands) {
  const ScalarType type = out.scalar_type();
  return type != at::kHalf && ((operands.scalar_type() == type) && ...);
}

void multiply(const Tensor& self, const Tensor& mat2, const Tensor& out) {
  require_floating({self, mat2});
  if (blocked_matmul(self, mat2, /*bias=*/Tensor(), out)) return;
  if (blocked_batch_matmul(self, mat2, out)) return;
  if (!is_direct(out, self, mat2)) {
    store(out, multiply_rows(widen(self), widen(mat2)));
  } else if (self.dim() == 2 && mat2.dim() == 2) {
    at::mm_out(const_cast<Tensor&>(out), self, mat2);
  } else if (self.dim() == 3 && mat2.dim() == 3 && self.size(0) == mat2.size(0)) {
    at::bmm_out(const_cast<Tensor&>(out), self, mat2);
  } else {
    store(out, at::matmul(self, mat2));
  }
}

void multiply_add(const Tensor& self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta,
                  const Scalar& alpha, const Tensor& out) {
  require_floating({mat1, mat2});
  const bool is_bias = self.dim() == 1 || (self.dim() == 2 && self.size(0) == 1);
  if (is_bias && beta.equal(1) && alpha.equal(1) &&
      blocked_matmul(mat1, mat2, self.reshape(-1), out)) {
    return;
  }
  if (is_direct(out, self, mat1, mat2)) {
    at::addmm_out(const_cast<Tensor&>(out), self, mat1, mat2, beta, alpha);
  } else {
    store(out,
          at::addmm(self.to(at::kFloat), mat1.to(at::kFloat), mat2.to(at::kFloat), beta, alpha));
  }
}

}  // namespace

VNPU_OPERATOR(Mm, (const Tensor& self, const Tensor& mat2, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_mm, .allowed = allowed_mm}) {
  require(self.dim() == 2 && mat2.dim() == 2, "both operands must be matrices");
  multiply(self, mat2, out.tensor);
}
VNPU_OPERATOR(Matmul, (const Tensor& self, const Tensor& mat2, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_mm, .allowed = allowed_matmul}) {
  multiply(self, mat2, out.tensor);
}
VNPU_OPERATOR(BatchMatMul, (const Tensor& self, const Tensor& mat2, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_mm, .allowed = allowed_batch_mat_mul}) {
  require(self.dim() == 3 && mat2.dim() == 3, "both operands must have 3 dimensions");
  multiply(self, mat2, out.tensor);
}

VNPU_OPERATOR(Addmm,
              (const Tensor& self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_addmm, .allowed = allowed_addmm}) {
  multiply_add(self, mat1, mat2, beta, alpha, out.tensor);
}
VNPU_OPERATOR(InplaceAddmm,
              (InOut self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta,
               const Scalar& alpha, int8_t),
              {.tier = kT1, .cost = cost_of_addmm}) {
  multiply_add(self.tensor, mat1, mat2, beta, alpha, self.tensor);
}
VNPU_OPERATOR(Addmv,
              (const Tensor& self, const Tensor& mat, const Tensor& vec, const Scalar& alpha,
               const Scalar& beta, Out out, int8_t),
              {.tier = kT1, .cost = elements<2>}) {
  require_floating({mat, vec});
  store(out, at::addmv(widen(self), widen(mat), widen(vec), beta, alpha));
}
VNPU_OPERATOR(Mv, (const Tensor& self, const Tensor& vec, Out out, int8_t),
              {.tier = kT1, .cost = elements<2>}) {
  require_floating({self, vec});
  store(out, at::mv(widen(self), widen(vec)));
}
VNPU_OPERATOR(Dot, (const Tensor& self, const Tensor& tensor, Out out),
              {.tier = kT1, .cost = elements<2>}) {
  store(out, at::dot(widen(self), widen(tensor)));
}
VNPU_OPERATOR(Baddbmm,
              (const Tensor& self, const Tensor& batch1, const Tensor& batch2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_baddbmm}) {
  require_floating({batch1, batch2});
  if (is_direct(out.tensor, self, batch1, batch2)) {
    at::baddbmm_out(out.tensor, self, batch1, batch2, beta, alpha);
  } else {
    store(out, at::baddbmm(widen(self), widen(batch1), widen(batch2), beta, alpha));
  }
}
VNPU_OPERATOR(Addbmm,
              (const Tensor& self, const Tensor& batch1, const Tensor& batch2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_baddbmm}) {
  require_floating({batch1, batch2});
  store(out, at::addbmm(widen(self), widen(batch1), widen(batch2), beta, alpha));
}
VNPU_OPERATOR(Addr,
              (const Tensor& self, const Tensor& vec1, const Tensor& vec2,
               const OptionalScalar& beta, const OptionalScalar& alpha, Out out),
              {.tier = kT1, .cost = elements<2>}) {
  store(out, at::addr(widen(self), widen(vec1), widen(vec2), beta.value_or(1), alpha.value_or(1)));
}

// --- weights in FRACTAL_NZ
// -------------------------------------------------------------------------
VNPU_OPERATOR(MatmulWeightNz, (const Tensor& self, const LaidOut& mat2, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_mm}) {
  multiply(self, mat2.matrix(), out.tensor);
}
VNPU_OPERATOR(BatchMatMulWeightNz, (const Tensor& self, const LaidOut& mat2, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_mm}) {
  multiply(self, mat2.matrix(), out.tensor);
}
VNPU_OPERATOR(AddmmWeightNz,
              (const Tensor& self, const Tensor& mat1, const LaidOut& mat2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.tier = kT1, .cost = cost_of_addmm}) {
  multiply_add(self, mat1, mat2.matrix(), beta, alpha, out.tensor);
}

// The result is y, which `out` is too or gets a copy of. A row of index -1 has no slot, as in
// torch_npu's example; the documents do not say so.
VNPU_OPERATOR(AddLora,
              (InOut y, const Tensor& x, const Tensor& weight_b, const Tensor& indices,
               const OptionalTensor& weight_a, int64_t layer_idx, double scale, int64_t y_offset,
               int64_t y_slice_size, Out out),
              {.tier = kT3, .cost = cost_of_add_lora, .allowed = allowed_add_lora}) {
  const int64_t slots = weight_b.size(0);
  const int64_t columns = weight_b.size(2);
  require(layer_idx >= 0 && layer_idx < weight_b.size(1),
          "layer_idx must name a layer of weight_b");
  require(y_slice_size == -1 || y_slice_size == columns,
          "y_slice_size must be -1 or the third size of weight_b");
  require(y_offset >= 0 && y_offset + columns <= y.tensor.size(1),
          "y_offset and the third size of weight_b must stay within y's columns");
  require(indices.numel() == 0 ||
              (indices.min().item<int>() >= -1 && indices.max().item<int>() < slots),
          "indices must name slots of weight_b, or be -1 for none");
  const Tensor sum = y.tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const Tensor rows = indices.eq(slot).nonzero().flatten();
    if (rows.numel() == 0) continue;
    Tensor found = x.index_select(0, rows).to(at::kFloat);
    const auto times = [&](const Tensor& weights) {
      const Tensor weight = weights.select(0, slot).select(0, layer_idx).to(at::kFloat).t();
      Tensor product = at::empty({found.size(0), weight.size(1)}, at::kFloat);
      multiply(found, weight, product);
      found = product;
    };
    if (weight_a.has_value()) times(*weight_a);
    times(weight_b);
    sum.narrow(1, y_offset, columns).index_add_(0, rows, found, scale);
  }
  store(y.tensor, sum);
  store(out, sum);
}

}  // namespace vnpu::ops
