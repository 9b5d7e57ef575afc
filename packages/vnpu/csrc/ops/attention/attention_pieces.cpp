// Operations around attention, for models without one fused operator.

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/integer_matrices.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

static Rules rules_of_attention_update() {
  return {"aclnnAttentionUpdate.md, parameters",
          {{"lse", {dtype({at::kFloat}), dims(1, 1)}},
           {"parts",
            {dtype({at::kFloat, at::kHalf, at::kBFloat16}), dims(2, 2),
             that("be 1 to 16 parts, as many as lse", {"lse"},
                  [](const RuleArguments& own) {
                    const uint32_t parts = own[0].tensors.count;
                    return parts >= 1 && parts <= 16 && parts == own[1].tensors.count;
                  })}},
           {"parts", size_between(-1, 8, 512, 8), {.tiling = true}},
           {"lse", same_size(0, "parts", 0)},
           {"out", {same_dtype("parts"), same_sizes("parts")}},
           {"wants_lse", one_of(0, 1)}},
          {.bytes = 16 * kMiB},
          kBigChips};
}
// Merges attention over parts of the keys: each part's result counts with e^(its lse).
VNPU_OPERATOR(AttentionUpdate,
              (const TensorList& lse, const TensorList& parts, int64_t wants_lse, Out out,
               OptionalOut lse_out),
              {.tier = kT2, .cost = elements<6>, .rules = rules_of_attention_update()}) {
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

static Check no_mix_with(const char* other) {
  return that(std::string("have the dtype of ") + other, {other},
              [](const RuleArguments& own) { return own.tensor().dtype == own.tensor(1).dtype; });
}
using Order = std::vector<int64_t>;
static Check order(std::vector<Order> allowed, std::string rule) {
  return that(std::move(rule), {},
              [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
                const Order& seen = own.integers();
                for (const Order& each : allowed) {
                  if (seen == each) return std::nullopt;
                }
                std::string shown = "value";
                for (const int64_t dimension : seen) shown += " " + text(dimension);
                return shown;
              });
}
static Rules rules_of_transpose_batch_mat_mul() {
  return {
      "ops-nn matmul/transpose_batch_mat_mul/docs/aclnnTransposeBatchMatMul.md, constraints",
      {{"x1", {dtype(kFloats), dims(3, 3)}},
       {"x2", {no_mix_with("x1"), dims(3, 3)}},
       {"permute_x1", order({{0, 1, 2}, {1, 0, 2}}, "be 0 1 2 or 1 0 2")},
       {"permute_x2", order({{0, 1, 2}}, "be 0 1 2"), {.until = CannRelease::k8_5}},
       {"permute_x2",
        order({{0, 1, 2}, {0, 2, 1}}, "be 0 1 2 or 0 2 1"),
        {.since = CannRelease::k9_0}},
       {"permute_y", order({{1, 0, 2}}, "be 1 0 2")},
       {"x2",
        {size_between(0, 1, 65535), size_between(1, 16, 65535, 16), size_between(2, 16, 65535, 16)},
        {.tiling = true}},
       {"x1",
        that("have rows of fewer than 65536 entries, over all heads where tokens come first",
             {"permute_x1"},
             [](const RuleArguments& own) {
               const TensorView& x = own.tensor();
               const Order& permute = own.integers(1);
               const bool tokens_first = !permute.empty() && permute[0] == 1;
               const int64_t row = size_of(x, 2) * (tokens_first ? size_of(x, 1) : 1);
               return row < 65536;
             }),
        {.until = CannRelease::k8_5, .tiling = true}},
       {"bias", absent()},
       {"scale", dtype({at::kLong, at::kUInt64})},
       {"out", same_dtype("x1").when(is_missing("scale"))}},
      {.bytes = 24 * kMiB, .copies = true},
      kBigChips};
}
// Batched product with operands in any order of dimensions; the first dimension of the right
// operand is the batch.
static void cost_of_transpose_batch_mat_mul(const Call& call, Work& work) {
  work.kind = Work::Class::kMatmul;
  const TensorView& left = call.tensor("x1");
  const TensorView& right = call.tensor("x2");
  const TensorView& out = call.tensor("out");
  const int64_t batch = size_of(right, 0);
  if (batch == 0 || out.numel() == 0) return;
  MatrixProduct product;
  product.batch = batch;
  // left * right / out = batch * k * k.
  product.k =
      std::llround(std::sqrt(static_cast<double>(left.numel()) / static_cast<double>(out.numel()) *
                             static_cast<double>(right.numel() / batch)));
  product.k = std::max<int64_t>(product.k, 1);
  product.m = left.numel() / batch / product.k;
  product.n = right.numel() / batch / product.k;
  product.arithmetic = arithmetic_of(left);
  work.products.push_back(product);
}
// Batched products with permuted operands: y = (x1.permute(p1) @ x2.permute(p2)).permute(py).
VNPU_OPERATOR(TransposeBatchMatMul,
              (const Tensor& x1, const Tensor& x2, const OptionalTensor& bias,
               const OptionalTensor& scale, const IntArray& permute_x1, const IntArray& permute_x2,
               const IntArray& permute_y, int8_t, int32_t split, Out out),
              {.tier = kT2,
               .cost = cost_of_transpose_batch_mat_mul,
               .rules = rules_of_transpose_batch_mat_mul()}) {
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
  } else if (split > 1) {  // the last dimension in `split` parts, outermost
    const int64_t rows = y.size(0);
    store(out, y.reshape({rows, split, -1}).transpose(0, 1));
  } else {
    store(out, y);
  }
}

}  // namespace vnpu::ops
