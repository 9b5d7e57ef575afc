// Costs of convolutions and pooling.

#include "ops/costs.h"

namespace vnpu::ops {
namespace {

using timing::Work;

const bool convolution = price("cost: Convolution ConvTbc", [](const Call& call, Work& work) {
  work.kind = Work::Class::kMatmul;
  const TensorView& output = call.tensor("output");
  const TensorView& weight = call.tensor("weight");
  const bool is_tbc = weight.dims == 3 && call.has("pad");
  const int64_t channels = std::max<int64_t>(size_at(weight, is_tbc ? -1 : 0), 1);
  timing::MatrixProduct product;
  product.m = output.numel() / channels;
  product.n = channels;
  product.k = weight.numel() / channels;
  product.arithmetic = timing::Arithmetic::kFloat16;
  work.products.push_back(product);
});
const bool pooling = price(
    "cost: AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool2d AvgPool2d AvgPool3d"
    " ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d"
    " ReplicationPad2d ReplicationPad3d UpsampleBicubic2d UpsampleBilinear2d UpsampleLinear1d"
    " UpsampleNearest1d UpsampleNearest2d UpsampleNearest2dV2 UpsampleNearestExact1d",
    [](const Call& call, Work& work) { for_each_element(call, work, 8); });

}  // namespace
}  // namespace vnpu::ops
