// Root-mean-square normalization, with the residual addition and quantization around it.

#include "launch/stage.h"
#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

Operator kAddRmsNorm("aclnnAddRmsNorm");  // takes no empty tensors

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

Tensor rms_norm(const arguments::rms_norm& a) {
  check(a.x, nullptr, a.weight);
  Tensor normalized = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta()) return normalized;
  Stage stage("rms_norm", a.x);
  const Scratch scratch(a.x, {{at::kFloat, with_last(a.x, 1)}});
  stage.run(kRmsNorm, a.x, a.weight, a.epsilon, normalized, scratch[0]);
  stage.submit();
  return normalized;
}

Tensors<2> add_rms_norm(const arguments::add_rms_norm& a) {
  check(a.x, &a.residual, a.weight);
  Tensor normalized = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  Tensor sum = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta() || a.x.numel() == 0) return {normalized, sum};
  Stage stage("add_rms_norm", a.x);
  const Scratch scratch(a.x, {{at::kFloat, with_last(a.x, 1)}});
  stage.run(kAddRmsNorm, a.x, a.residual, a.weight, a.epsilon, normalized, scratch[0], sum);
  stage.submit();
  return {normalized, sum};
}

Tensors<3> add_rms_norm_dynamic_quant(const arguments::add_rms_norm_dynamic_quant& a) {
  check(a.x, &a.residual, a.weight);
  Tensor quantized = empty(a.x.sizes(), at::kChar, a.x);
  Tensor scale = empty(a.x.sizes().slice(0, static_cast<size_t>(a.x.dim() - 1)), at::kFloat, a.x);
  Tensor sum = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta() || a.x.numel() == 0) return {quantized, scale, sum};
  Stage stage("add_rms_norm_dynamic_quant", a.x);
  const Scratch scratch(a.x,
                        {{at::kFloat, with_last(a.x, 1)}, {a.x.scalar_type(), a.x.sizes().vec()}});
  stage.run(kAddRmsNorm, a.x, a.residual, a.weight, a.epsilon, scratch[1], scratch[0], sum);
  stage.run(kDynamicQuant, scratch[1], nullptr, quantized, scale);
  stage.submit();
  return {quantized, scale, sum};
}

Tensors<2> add_rms_norm_quant(const arguments::add_rms_norm_quant& a) {
  check(a.x, &a.residual, a.weight);
  check_quantization(a.weight, a.bias, a.scale, a.offset);
  Tensor quantized = empty(a.x.sizes(), at::kChar, a.x);
  Tensor sum = empty(a.x.sizes(), a.x.scalar_type(), a.x);
  if (a.x.is_meta() || a.x.numel() == 0) return {quantized, sum};
  Stage stage("add_rms_norm_quant", a.x);
  const Scratch scratch(a.x,
                        {{at::kFloat, with_last(a.x, 1)}, {a.x.scalar_type(), a.x.sizes().vec()}});
  stage.run(kAddRmsNorm, a.x, a.residual, a.weight, a.epsilon, scratch[1], scratch[0], sum);
  if (a.bias.has_value()) stage.run(kInplaceAdd, scratch[1], a.bias, Number<int64_t>{1});
  constexpr int32_t kLastAxis = -1;
  // aclnnAddRmsNormQuant is not used, because it may skip the rounding of the norm to x's dtype.
  stage.run(kQuantize, scratch[1], a.scale, a.offset, AclType{at::kChar}, kLastAxis, quantized);
  stage.submit();
  return {quantized, sum};
}

}  // namespace davinci
