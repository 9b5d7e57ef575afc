// Root-mean-square normalization, with the residual addition and quantization around it.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {
namespace {

Operator kRmsNorm("aclnnRmsNorm");
Operator kAddRmsNorm("aclnnAddRmsNorm");
Operator kInplaceAdd("aclnnInplaceAdd");
Operator kDynamicQuant("aclnnDynamicQuant");
Operator kQuantize("aclnnQuantize");

// Sizes of x with the last replaced.
std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

void check(const Tensor& x, const Tensor* residual, const Tensor& weight) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0),
                    "x of sizes ", x.sizes(), " and a weight of sizes ", weight.sizes(),
                    ": the weight has one entry per entry of x's last dimension");
  TORCH_CHECK_VALUE(residual == nullptr || residual->sizes() == x.sizes(), "a residual of sizes ",
                    residual == nullptr ? at::IntArrayRef() : residual->sizes(),
                    " is added to x of sizes ", x.sizes(), ": give both the same sizes");
}

void check_quantization(const Tensor& weight, const OptionalTensor& bias, const Tensor& scale,
                        const Tensor& offset) {
  TORCH_CHECK_VALUE(!bias.has_value() || bias->sizes() == weight.sizes(), "a bias of sizes ",
                    bias.has_value() ? bias->sizes() : at::IntArrayRef(),
                    " beside a weight of sizes ", weight.sizes(), ": give both the same sizes");
  TORCH_CHECK_VALUE(scale.numel() == 1 && offset.numel() == 1, "a scale of sizes ", scale.sizes(),
                    " and an offset of sizes ", offset.sizes(), ": give [1] both");
}

}  // namespace

namespace npu {

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  check(x, nullptr, weight);
  Stage stage("rms_norm", x);
  Tensor normalized = empty(x.sizes(), x.scalar_type(), x);
  const Scratch scratch(x, {{at::kFloat, with_last(x, 1)}});
  stage.run(kRmsNorm, x, weight, epsilon, normalized, scratch[0]);
  stage.submit();
  return normalized;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double epsilon) {
  check(x, &residual, weight);
  Stage stage("add_rms_norm", x);
  Tensor normalized = empty(x.sizes(), x.scalar_type(), x);
  Tensor sum = empty(x.sizes(), x.scalar_type(), x);
  const Scratch scratch(x, {{at::kFloat, with_last(x, 1)}});
  stage.run(kAddRmsNorm, x, residual, weight, epsilon, normalized, scratch[0], sum);
  stage.submit();
  return {normalized, sum};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_dynamic_quant(const Tensor& x,
                                                              const Tensor& residual,
                                                              const Tensor& weight,
                                                              double epsilon) {
  check(x, &residual, weight);
  Stage stage("add_rms_norm_dynamic_quant", x);
  Tensor quantized = empty(x.sizes(), at::kChar, x);
  Tensor scale = empty(x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)), at::kFloat, x);
  Tensor sum = empty(x.sizes(), x.scalar_type(), x);
  const Scratch scratch(x, {{at::kFloat, with_last(x, 1)}, {x.scalar_type(), x.sizes().vec()}});
  stage.run(kAddRmsNorm, x, residual, weight, epsilon, scratch[1], scratch[0], sum);
  stage.run(kDynamicQuant, scratch[1], nullptr, quantized, scale);
  stage.submit();
  return {quantized, scale, sum};
}

std::tuple<Tensor, Tensor> add_rms_norm_quant(const Tensor& x, const Tensor& residual,
                                              const Tensor& weight, const OptionalTensor& bias,
                                              const Tensor& scale, const Tensor& offset,
                                              double epsilon) {
  check(x, &residual, weight);
  check_quantization(weight, bias, scale, offset);
  Stage stage("add_rms_norm_quant", x);
  Tensor quantized = empty(x.sizes(), at::kChar, x);
  Tensor sum = empty(x.sizes(), x.scalar_type(), x);
  const Scratch scratch(x, {{at::kFloat, with_last(x, 1)}, {x.scalar_type(), x.sizes().vec()}});
  stage.run(kAddRmsNorm, x, residual, weight, epsilon, scratch[1], scratch[0], sum);
  if (bias.has_value()) stage.run(kInplaceAdd, scratch[1], bias, Number<int64_t>{1});
  constexpr int32_t kLastAxis = -1;
  // aclnnAddRmsNormQuant is not used: it need not round the norm to x's dtype in between.
  stage.run(kQuantize, scratch[1], scale, offset, AclType{at::kChar}, kLastAxis, quantized);
  stage.submit();
  return {quantized, sum};
}

}  // namespace npu

namespace meta {

Tensor rms_norm(const Tensor& x, const Tensor& weight, double) {
  check(x, nullptr, weight);
  return empty(x.sizes(), x.scalar_type(), x);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double) {
  check(x, &residual, weight);
  return {empty(x.sizes(), x.scalar_type(), x), empty(x.sizes(), x.scalar_type(), x)};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_dynamic_quant(const Tensor& x,
                                                              const Tensor& residual,
                                                              const Tensor& weight, double) {
  check(x, &residual, weight);
  return {empty(x.sizes(), at::kChar, x),
          empty(x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)), at::kFloat, x),
          empty(x.sizes(), x.scalar_type(), x)};
}

std::tuple<Tensor, Tensor> add_rms_norm_quant(const Tensor& x, const Tensor& residual,
                                              const Tensor& weight, const OptionalTensor& bias,
                                              const Tensor& scale, const Tensor& offset, double) {
  check(x, &residual, weight);
  check_quantization(weight, bias, scale, offset);
  return {empty(x.sizes(), at::kChar, x), empty(x.sizes(), x.scalar_type(), x)};
}

}  // namespace meta
}  // namespace davinci
