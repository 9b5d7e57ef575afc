// Costs of convolutions and pooling.

#include "ops/vision/declarations.h"

namespace vnpu::ops {
namespace {

using timing::Work;

}  // namespace

void cost_of_convolution(const Call& call, Work& work) {
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
}

}  // namespace vnpu::ops
