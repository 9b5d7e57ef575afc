// What surrounds attention when it is not one fused operator.

#include <limits>

#include "ops/attention/declarations.h"
#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/declarations.h"
#include "ops/matmul/integer_matrices.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"

namespace vnpu::ops {

// Merges attention over parts of the keys: each part's result counts with e^(its lse).
VNPU_OPERATOR(AttentionUpdate,
              (const TensorList& lse, const TensorList& parts, int64_t wants_lse, Out out,
               OptionalOut lse_out),
              {.tier = kT2, .cost = elements<6>, .allowed = allowed_attention_update}) {
  require(!lse.empty() && lse.size() == parts.size(),
          "lse and localOut must have one tensor per part each.");
  if (out.tensor.numel() == 0) return;
  std::vector<Tensor> all;
  for (const Tensor& one : lse) {
    // +inf marks a part that saw no key.
    all.push_back(
        one.to(at::kFloat).masked_fill(one.isposinf(), -std::numeric_limits<double>::infinity()));
  }
  const Tensor stacked = at::stack(all);
  const Tensor merged = at::logsumexp(stacked, 0);
  Tensor sum = at::zeros(out.tensor.sizes(), at::kFloat);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor weight = at::exp(all[i] - merged).nan_to_num(0.0);
    sum = sum + parts[i].to(at::kFloat) * weight.unsqueeze(-1);
  }
  store(out, sum);
  if (wants_lse == 1) store(lse_out, merged);
}

VNPU_OPERATOR(ScaledMaskedSoftmax,
              (const Tensor& x, const Tensor& mask, double scale, bool triangle, Out out),
              {.tier = kT2, .cost = elements<6>}) {
  require(!triangle, "fixedTriuMask is not supported by the device either; pass the mask.");
  constexpr double kHidden = -10000.0;  // what the device puts in place of a masked score
  store(out, at::softmax((x.to(at::kFloat) * scale).masked_fill(mask.to(at::kBool), kHidden), -1));
}

// Batched products with permuted operands: y = (x1.permute(p1) @ x2.permute(p2)).permute(py).
VNPU_OPERATOR(TransposeBatchMatMul,
              (const Tensor& x1, const Tensor& x2, const OptionalTensor& bias,
               const OptionalTensor& scale, const IntArray& permute_x1, const IntArray& permute_x2,
               const IntArray& permute_y, int8_t, int32_t split, Out out),
              {.tier = kT2,
               .cost = cost_of_transpose_batch_mat_mul,
               .allowed = allowed_transpose_batch_mat_mul}) {
  if (out.tensor.numel() == 0) return;
  const auto permuted = [](const Tensor& x, const IntArray& order) {
    return order.empty() ? x : x.permute(order);
  };
  const ScalarType type = x1.scalar_type();
  if (!bias && !scale && split <= 1 && x2.scalar_type() == type &&
      out.tensor.scalar_type() == type) {
    // ATen accumulates 16-bit floats in float32 and rounds once, into the output's own memory.
    std::vector<int64_t> back(permute_y.size());
    for (size_t i = 0; i < back.size(); ++i) {
      back[static_cast<size_t>(permute_y[i])] = static_cast<int64_t>(i);
    }
    Tensor y = back.empty() ? out.tensor : out.tensor.permute(back);
    const Tensor left = permuted(x1, permute_x1);
    const Tensor right = permuted(x2, permute_x2);
    if (!blocked_batch_matmul(left, right, y)) at::bmm_out(y, left, right);
    return;
  }
  Tensor y = multiply_rows(permuted(x1, permute_x1).to(at::kFloat),
                           permuted(x2, permute_x2).to(at::kFloat));
  if (bias) y = y + bias->to(at::kFloat);
  y = permuted(y, permute_y);  // [rows, batch, columns]
  if (scale) {
    y = y.reshape({y.size(0), 1, -1}) * float_scales(*scale);
    store(out, out.tensor.scalar_type() == at::kChar ? to_int8(y) : y);
  } else if (split > 1) {  // the joint last dimension in `split` parts, outermost
    const int64_t rows = y.size(0);
    store(out, y.reshape({rows, split, -1}).transpose(0, 1));
  } else {
    store(out, y);
  }
}

}  // namespace vnpu::ops
