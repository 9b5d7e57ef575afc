// Norms by mean and variance: layer, group and batch norms. The arithmetic is float32 throughout;
// results are rounded once, on store.

#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

void layer_norm(const Tensor& input, const IntArray& normalized_shape, const OptionalTensor& weight,
                const OptionalTensor& bias, double epsilon, const Out& out,
                const OptionalOut& mean_out, const OptionalOut& rstd_out) {
  if (input.numel() == 0) return;
  // ATen wants weight and bias in the input's dtype, or in float32 beside a 16-bit input.
  const auto parameter = [](const OptionalTensor& value) {
    return value ? OptionalTensor(widen(*value)) : value;
  };
  const bool mixed = (weight && weight->scalar_type() != input.scalar_type()) ||
                     (bias && bias->scalar_type() != input.scalar_type());
  const auto [y, mean, rstd] =
      mixed ? at::native_layer_norm(widen(input), normalized_shape, parameter(weight),
                                    parameter(bias), epsilon)
            : at::native_layer_norm(input, normalized_shape, weight, bias, epsilon);
  store(out, y);
  store(mean_out, mean);
  store(rstd_out, rstd);
}

}  // namespace

static Rules rules_of_layer_norm() {
  return {"CheckDtypeValid, CheckShape in aclnn_layer_norm.cpp of ops-nn",
          {{"input", dtype(kFloats)},
           {"input", dtype({at::kFloat, at::kHalf}), {.chips = k310P}},
           {"weight, bias", dtype(kFloats)},
           {"weight", same_dtype("bias")},
           {"weight, bias", trailing_dimensions_of("input")},
           {"out", {dtype(kFloats), same_sizes("input")}}}};
}
VNPU_OPERATOR(LayerNorm,
              (const Tensor& input, const IntArray& normalized_shape, const OptionalTensor& weight,
               const OptionalTensor& bias, double epsilon, Out out, OptionalOut mean_out,
               OptionalOut rstd_out),
              {.cost = elements<8>, .rules = rules_of_layer_norm()}) {
  layer_norm(input, normalized_shape, weight, bias, epsilon, out, mean_out, rstd_out);
}
// The same function, which torch_npu asks for under use_compatible_impl(True).
VNPU_OPERATOR(FastLayerNorm,
              (const Tensor& input, const IntArray& normalized_shape, const OptionalTensor& weight,
               const OptionalTensor& bias, double epsilon, Out out, OptionalOut mean_out,
               OptionalOut rstd_out),
              {.tier = kOther, .cost = elements<8>, .rules = rules_of_layer_norm()}) {
  layer_norm(input, normalized_shape, weight, bias, epsilon, out, mean_out, rstd_out);
}
VNPU_OPERATOR(GroupNorm,
              (const Tensor& self, const OptionalTensor& gamma, const OptionalTensor& beta,
               int64_t n, int64_t c, int64_t hxw, int64_t group, double epsilon, Out out,
               Out mean_out, Out rstd_out),
              {.cost = elements<8>}) {
  const auto [y, mean, rstd] =
      at::native_group_norm(self.contiguous(), gamma, beta, n, c, hxw, group, epsilon);
  store(out, y);
  store(mean_out, mean);
  store(rstd_out, rstd);
}
// Running statistics are updated in place when training.
VNPU_OPERATOR(BatchNorm,
              (const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
               OptionalInOut running_mean, OptionalInOut running_var, bool training,
               double momentum, double epsilon, Out output, OptionalOut save_mean,
               OptionalOut save_invstd),
              {.cost = elements<8>}) {
  const auto [y, mean, invstd] = at::native_batch_norm(
      input, weight, bias, running_mean.tensor, running_var.tensor, training, momentum, epsilon);
  store(output, y);
  if (training) {
    store(save_mean, mean);
    store(save_invstd, invstd);
  }
}

}  // namespace vnpu::ops
