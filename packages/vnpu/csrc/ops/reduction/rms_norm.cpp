// Root mean square norms with their fused additions and quantisation. The arithmetic is float32
// throughout; results are rounded once, on store.

#include "ops/reduction/rms_norm.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "ops/float_rows.h"
#include "ops/quantization/int8_quantization.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kGrainElements = 32768;  // work worth a second thread

// Inputs and outputs of a root mean square norm of rows, as dense tensors of one dtype.
struct RmsNorm {
  Tensor x;                      // [..., columns...]
  int64_t row_stride = 0;        // elements from one row of x to the next
  OptionalTensor residual = {};  // like x: normalises x + residual
  Tensor gamma;                  // [columns...]
  float gamma_offset = 0;        // 1 for Gemma, whose weights are stored around 0
  double epsilon = 0;
  Tensor y;          // like x
  Tensor sum = {};   // like x: x + residual, in x's dtype; undefined when not wanted
  Tensor rstd = {};  // [rows] float32; undefined when not wanted
};

template <class T>
void run_rows(const RmsNorm& norm, int64_t columns) {
  const int64_t rows = norm.x.numel() / columns;
  const T* x = norm.x.const_data_ptr<T>();
  const T* residual = norm.residual ? norm.residual->const_data_ptr<T>() : nullptr;
  T* y = norm.y.mutable_data_ptr<T>();
  T* sum = norm.sum.defined() ? norm.sum.mutable_data_ptr<T>() : nullptr;
  float* rstd = norm.rstd.defined() ? norm.rstd.mutable_data_ptr<float>() : nullptr;
  std::vector<float> gamma(columns);
  const Tensor weight = norm.gamma.to(at::kFloat).contiguous();
  float_rows::load(weight.const_data_ptr<float>(), gamma.data(), columns);
  if (norm.gamma_offset != 0) {
    for (float& value : gamma) value += norm.gamma_offset;
  }
  at::parallel_for(
      0, rows, std::max<int64_t>(1, kGrainElements / columns), [&](int64_t begin, int64_t end) {
        std::vector<float> row(columns);
        std::vector<float> other(residual == nullptr ? 0 : columns);
        std::vector<T> rounded(residual == nullptr ? 0 : columns);
        for (int64_t i = begin; i < end; ++i) {
          float_rows::load(x + i * norm.row_stride, row.data(), columns);
          if (residual != nullptr) {
            // The norm sees the sum as the next layer will: rounded to the model's dtype.
            float_rows::load(residual + i * columns, other.data(), columns);
            float_rows::add(row.data(), other.data(), row.data(), columns);
            T* target = sum == nullptr ? rounded.data() : sum + i * columns;
            float_rows::store(row.data(), target, columns);
            float_rows::load(target, row.data(), columns);
          }
          const float mean =
              float_rows::sum_of_squares(row.data(), columns) / static_cast<float>(columns);
          const float factor = 1.0f / std::sqrt(mean + static_cast<float>(norm.epsilon));
          float_rows::scale(row.data(), factor, gamma.data(), row.data(), columns);
          float_rows::store(row.data(), y + i * columns, columns);
          if (rstd != nullptr) rstd[i] = factor;
        }
      });
}

// Distance of rows in elements if rows of `columns` elements are dense themselves, like a slice of
// a wider matrix; none otherwise.
std::optional<int64_t> row_stride(const Tensor& x, int64_t columns) {
  if (x.is_contiguous()) return columns;
  if (x.dim() < 2 || x.size(-1) != columns || x.stride(-1) != 1 ||
      x.numel() != x.size(0) * columns) {
    return std::nullopt;
  }
  return x.stride(0);
}

// Memory that a kernel writes densely: the output itself if it is dense and of that dtype, else a
// temporary that finish() copies.
class DenseOutput {
 public:
  DenseOutput(const Tensor& out, ScalarType type)
      : out_(out),
        dense_(out.is_contiguous() && out.scalar_type() == type
                   ? out
                   : at::empty(out.sizes(), at::TensorOptions().dtype(type))) {}
  const Tensor& tensor() const { return dense_; }
  void finish() const {
    if (!dense_.is_same(out_)) out_.copy_(dense_);
  }

 private:
  Tensor out_;
  Tensor dense_;
};

// The epilogue of every root mean square norm. `y` may have another dtype than x.
void rms_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
              float gamma_offset, double epsilon, const Tensor& y, const std::optional<Tensor>& sum,
              const std::optional<Tensor>& rstd) {
  const int64_t columns = gamma.numel();
  const int64_t shared = std::min(x.dim(), gamma.dim());
  if (gamma.dim() > x.dim() || x.sizes().slice(x.dim() - shared) != gamma.sizes()) {
    refuse("gamma's shape must be the last dimensions of x's; x has " + c10::str(x.sizes()) +
           ", gamma " + c10::str(gamma.sizes()));
  }
  if (residual && residual->sizes() != x.sizes()) {
    refuse("both addends must have one shape; got " + c10::str(x.sizes()) + " and " +
           c10::str(residual->sizes()));
  }
  if (x.numel() == 0) return;
  const ScalarType type = x.scalar_type();
  const DenseOutput dense_y(y, type);
  std::optional<DenseOutput> dense_sum;
  std::optional<DenseOutput> dense_rstd;
  const std::optional<int64_t> stride = row_stride(x, columns);
  RmsNorm norm{.x = stride ? x : x.contiguous(),
               .row_stride = stride.value_or(columns),
               .gamma = gamma,
               .gamma_offset = gamma_offset,
               .epsilon = epsilon,
               .y = dense_y.tensor()};
  if (residual) norm.residual = residual->to(type).contiguous();
  if (sum) norm.sum = dense_sum.emplace(*sum, type).tensor();
  if (rstd && rstd->numel() > 0) norm.rstd = dense_rstd.emplace(*rstd, at::kFloat).tensor();
  switch (type) {
    case at::kFloat: run_rows<float>(norm, columns); break;
    case at::kBFloat16: run_rows<at::BFloat16>(norm, columns); break;
    case at::kHalf: run_rows<at::Half>(norm, columns); break;
    default:
      refuse(std::string("x must be float32, float16 or bfloat16; got ") + at::toString(type));
  }
  dense_y.finish();
  if (dense_sum) dense_sum->finish();
  if (dense_rstd) dense_rstd->finish();
}

// y * scales + zero_points (or y / scales + zero_points) as int8; without scales, nothing is
// written.
void quantize(const Tensor& y, const OptionalTensor& scales, const OptionalTensor& zero_points,
              bool divide, const Tensor& out) {
  if (!scales) return;
  if (out.scalar_type() != at::kChar) {
    refuse(std::string("the quantised output must be int8; got ") +
           at::toString(out.scalar_type()));
  }
  const Tensor factors = scales->to(at::kFloat);
  Tensor scaled = divide ? y / factors : y * factors;
  if (zero_points) scaled += zero_points->to(at::kFloat);
  store(out, to_int8(scaled));
}

// y, times `smooth` where it is given, as rows of int8 with a scale each.
void quantize_dynamically(const Tensor& y, const OptionalTensor& smooth, const Tensor& out,
                          const Tensor& scale) {
  require(out.scalar_type() == at::kChar, "only int8 outputs are implemented");
  const auto [rows, scales] = quantize_rows(smooth ? y * smooth->to(at::kFloat) : y);
  store(out, rows);
  store(scale, scales.reshape(scale.sizes()));
}

// The sum goes to `x`, its norm in float32 is returned.
Tensor add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma,
                    const OptionalTensor& beta, double epsilon, const Tensor& x) {
  store(x, x1 + x2);
  const Tensor sum = x.to(at::kFloat);
  Tensor y = at::empty_like(sum, at::MemoryFormat::Contiguous);
  rms_norm(sum, std::nullopt, gamma, 0, epsilon, y, std::nullopt, std::nullopt);
  if (beta) y += beta->to(at::kFloat);
  return y;
}

}  // namespace

void rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, const Tensor& y) {
  rms_norm(x, std::nullopt, gamma, 0, epsilon, y, std::nullopt, std::nullopt);
}

constexpr char kRmsNorm310P[] = "ops-nn norm/rms_norm/docs/aclnnRmsNorm.md, constraints of 310P";
static Rules rules_of_rms_norm() {
  return {"ops-nn norm/rms_norm/docs/aclnnRmsNorm.md, parameters",
          {{"x", {dtype(kFloats), dims(1, 8)}},
           {"x", dtype({at::kFloat, at::kHalf}), kRmsNorm310P, {.chips = k310P}},
           {"x",
            that("have a last dimension of at least 32 bytes", {},
                 [](const RuleArguments& own) {
                   const TensorView& x = own.tensor();
                   return size_of(x, -1) * static_cast<int64_t>(at::elementSize(x.dtype)) >= 32;
                 }),
            kRmsNorm310P,
            {.chips = k310P, .tiling = true}},
           {"gamma", {dtype(kFloats), trailing_dimensions_of("x")}},
           {"y", {same_dtype("x"), same_sizes("x")}},
           {"rstd", dtype({at::kFloat})}},
          {.bytes = 16 * kMiB, .copies = true}};
}
VNPU_OPERATOR(RmsNorm, (const Tensor& x, const Tensor& gamma, double epsilon, Out y, Out rstd),
              {.tier = kT2, .cost = elements<8>, .rules = rules_of_rms_norm()}) {
  rms_norm(x, std::nullopt, gamma, 0, epsilon, y.tensor, std::nullopt, rstd.tensor);
}
VNPU_OPERATOR(GemmaRmsNorm, (const Tensor& x, const Tensor& gamma, double epsilon, Out y, Out rstd),
              {.tier = kT2, .cost = elements<8>}) {
  rms_norm(x, std::nullopt, gamma, 1, epsilon, y.tensor, std::nullopt, rstd.tensor);
}

static Rules rules_of_add_rms_norm() {
  return {"ops-nn norm/add_rms_norm/docs/aclnnAddRmsNorm.md, parameters",
          {{"x1", dtype(kFloats)},
           {"x1", dtype({at::kFloat, at::kHalf}), {.chips = k310P}},
           {"x1",
            not_empty(),
            "op-plugin torch_npu-npu_add_rms_norm.md, constraints",
            {.until = CannRelease::k8_5, .tiling = true}},
           {"x2", {same_dtype("x1"), same_sizes("x1")}},
           {"gamma", {same_dtype("x1"), trailing_dimensions_of("x1")}},
           {"y, x", same_dtype("x1")},
           {"rstd", dtype({at::kFloat})}},
          {.bytes = 16 * kMiB, .copies = true}};
}
VNPU_OPERATOR(AddRmsNorm,
              (const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon, Out y,
               Out rstd, Out x),
              {.tier = kT2, .cost = elements<8>, .rules = rules_of_add_rms_norm()}) {
  rms_norm(x1, x2, gamma, 0, epsilon, y.tensor, x.tensor, rstd.tensor);
}
// The norm is written over x1, the sum over x2.
VNPU_OPERATOR(InplaceAddRmsNorm,
              (InOut x1, InOut x2, const Tensor& gamma, double epsilon, Out rstd),
              {.tier = kT2, .cost = elements<8>}) {
  rms_norm(x1.tensor, x2.tensor, gamma, 0, epsilon, x1.tensor, x2.tensor, rstd.tensor);
}

VNPU_OPERATOR(AddRmsNormQuant,
              (const Tensor& x1, const Tensor& x2, const Tensor& gamma, const Tensor& scales1,
               const OptionalTensor& scales2, const OptionalTensor& zero_points1,
               const OptionalTensor& zero_points2, int64_t, double epsilon, bool divide, Out y1,
               Out y2, Out x),
              {.tier = kT2, .cost = elements<8>}) {
  const Tensor y = add_rms_norm(x1, x2, gamma, std::nullopt, epsilon, x.tensor);
  quantize(y, scales1, zero_points1, divide, y1.tensor);
  quantize(y, scales2, zero_points2, divide, y2.tensor);
}
VNPU_OPERATOR(AddRmsNormQuantV2,
              (const Tensor& x1, const Tensor& x2, const Tensor& gamma, const Tensor& scales1,
               const OptionalTensor& scales2, const OptionalTensor& zero_points1,
               const OptionalTensor& zero_points2, const OptionalTensor& beta, int64_t,
               double epsilon, bool divide, Out y1, Out y2, Out x, OptionalOut rms_norm_out),
              {.tier = kT2, .cost = elements<8>}) {
  const Tensor y = add_rms_norm(x1, x2, gamma, beta, epsilon, x.tensor);
  quantize(y, scales1, zero_points1, divide, y1.tensor);
  quantize(y, scales2, zero_points2, divide, y2.tensor);
  store(rms_norm_out, y);
}

static Rules rules_of_add_rms_norm_dynamic_quant() {
  return {
      "ops-nn norm/add_rms_norm_dynamic_quant/docs/aclnnAddRmsNormDynamicQuantV2.md, parameters",
      {{"x1", {dtype(kHalves), dims(2, 8)}},
       {"x2, x", {same_dtype("x1"), same_sizes("x1")}},
       {"gamma", {same_dtype("x1"), dims(1, 1), trailing_dimensions_of("x1")}},
       {"smooth_scale1, smooth_scale2, beta", {same_dtype("gamma"), same_sizes("gamma")}},
       {"scale1, scale2", dtype({at::kFloat})}},
      {},
      kBigChips};
}
// Rows of int8 and their scales, once or twice; see aclnnAddRmsNormDynamicQuantV2.md of ops-nn.
VNPU_OPERATOR(AddRmsNormDynamicQuantV2,
              (const Tensor& x1, const Tensor& x2, const Tensor& gamma,
               const OptionalTensor& smooth_scale1, const OptionalTensor& smooth_scale2,
               const OptionalTensor& beta, double epsilon, const BoolArray& output_mask, Out y1,
               Out y2, Out x, Out scale1, Out scale2),
              {.tier = kT2, .cost = elements<12>, .rules = rules_of_add_rms_norm_dynamic_quant()}) {
  const Tensor y = add_rms_norm(x1, x2, gamma, beta, epsilon, x.tensor);
  const bool has_mask = !output_mask.empty();
  if (has_mask ? output_mask[0] : true) {
    quantize_dynamically(y, smooth_scale1, y1.tensor, scale1.tensor);
  }
  if (has_mask ? output_mask[1] : smooth_scale1 && smooth_scale2) {
    quantize_dynamically(y, smooth_scale2, y2.tensor, scale2.tensor);
  }
}

}  // namespace vnpu::ops
