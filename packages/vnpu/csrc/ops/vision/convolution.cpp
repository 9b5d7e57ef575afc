// Convolutions of one to three dimensions, and their transposes. cubeMathType never lowers the
// precision here.

#include <algorithm>

#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

// An input and its padding. One dimension may have two numbers: padding before and after its
// entries. Source: ops-nn aclnnConvolution.md, padding.
std::pair<Tensor, IntArray> with_one_padding_each(const Tensor& input, const IntArray& padding,
                                                  bool transposed) {
  const auto dimensions = static_cast<size_t>(input.dim() - 2);
  if (padding.size() != 2 * dimensions) return {input, padding};
  IntArray before, sides;
  bool is_even = true;
  for (size_t i = 0; i < dimensions; ++i) {
    before.push_back(padding[2 * i]);
    is_even &= padding[2 * i] == padding[2 * i + 1];
    sides.insert(sides.begin(), {padding[2 * i], padding[2 * i + 1]});  // ATen: the last one first
  }
  if (is_even) return {input, before};
  require(!transposed, "a transposed convolution must have even paddings");
  return {at::constant_pad_nd(input, sides), IntArray(dimensions, 0)};
}

}  // namespace

static Check one_for_each_dimension() {
  return fits("have a number for each dimension of input but two", {"input"},
              [](const RuleArguments& own) {
                const auto numbers = static_cast<int64_t>(own.integers().size());
                return numbers == own.tensor(1).dims - 2;
              });
}
static void cost_of_convolution(const Call& call, Work& work) {
  work.kind = Work::Class::kMatmul;
  const TensorView& output = call.tensor("output");
  const TensorView& weight = call.tensor("weight");
  const bool is_tbc = weight.dims == 3 && call.has("pad");
  const int64_t channels = std::max<int64_t>(size_of(weight, is_tbc ? -1 : 0), 1);
  timing::MatrixProduct product;
  product.m = output.numel() / channels;
  product.n = channels;
  product.k = weight.numel() / channels;
  product.arithmetic = timing::Arithmetic::kFloat16;
  work.products.push_back(product);
}
VNPU_OPERATOR(Convolution,
              (const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
               const IntArray& stride, const IntArray& padding, const IntArray& dilation,
               bool transposed, const IntArray& output_padding, int64_t groups, Out output, int8_t),
              {.cost = cost_of_convolution,
               .rules = {"ops-nn conv/convolution_forward/docs/aclnnConvolution.md, parameters",
                         {{"input, weight, bias", dtype(kFloats), kOnBigChips},
                          {"input, weight", dims(3, 5)},
                          {"stride, dilation", one_for_each_dimension()},
                          {"groups", between(1, 65535)}}}}) {
  if (output.tensor.numel() == 0) return;
  const auto wide_bias = bias ? OptionalTensor(widen(*bias)) : bias;
  const auto [padded, paddings] = with_one_padding_each(widen(input), padding, transposed);
  store(output, at::convolution(padded, widen(weight), wide_bias, stride, paddings, dilation,
                                transposed, output_padding, groups));
}
VNPU_OPERATOR(ConvTbc,
              (const Tensor& self, const Tensor& weight, const Tensor& bias, int64_t pad,
               Out output, int8_t),
              {.cost = cost_of_convolution}) {
  if (output.tensor.numel() == 0) return;
  store(output, at::conv_tbc(widen(self), widen(weight), widen(bias), pad));
}

}  // namespace vnpu::ops
