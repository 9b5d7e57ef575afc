// Convolutions of one to three dimensions, and their transposes. cubeMathType never lowers the
// precision here.

#include "ops/operator.h"
#include "ops/vision/declarations.h"

namespace vnpu::ops {
namespace {

// An input and its padding, of which one dimension may have two numbers, the one before its entries
// and the one behind them. Source: ops-nn aclnnConvolution.md, padding.
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

VNPU_OPERATOR(Convolution,
              (const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
               const IntArray& stride, const IntArray& padding, const IntArray& dilation,
               bool transposed, const IntArray& output_padding, int64_t groups, Out output, int8_t),
              {.tier = kT1, .cost = cost_of_convolution, .allowed = allowed_convolution}) {
  if (output.tensor.numel() == 0) return;
  const auto wide_bias = bias ? OptionalTensor(widen(*bias)) : bias;
  const auto [padded, paddings] = with_one_padding_each(widen(input), padding, transposed);
  store(output, at::convolution(padded, widen(weight), wide_bias, stride, paddings, dilation,
                                transposed, output_padding, groups));
}
VNPU_OPERATOR(ConvTbc,
              (const Tensor& self, const Tensor& weight, const Tensor& bias, int64_t pad,
               Out output, int8_t),
              {.tier = kT1, .cost = cost_of_convolution}) {
  if (output.tensor.numel() == 0) return;
  store(output, at::conv_tbc(widen(self), widen(weight), widen(bias), pad));
}

}  // namespace vnpu::ops
