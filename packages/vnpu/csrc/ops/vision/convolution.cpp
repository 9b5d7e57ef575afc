// Convolutions of one to three dimensions, and their transposes. cubeMathType never lowers the
// precision here.

#include "ops/operator.h"
#include "ops/vision/declarations.h"

namespace vnpu::ops {

VNPU_OPERATOR(Convolution,
              (const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
               const IntArray& stride, const IntArray& padding, const IntArray& dilation,
               bool transposed, const IntArray& output_padding, int64_t groups, Out output, int8_t),
              {.tier = kT1, .cost = cost_of_convolution, .allowed = allowed_convolution}) {
  if (output.tensor.numel() == 0) return;
  const auto wide_bias = bias ? OptionalTensor(widen(*bias)) : bias;
  store(output, at::convolution(widen(input), widen(weight), wide_bias, stride, padding, dilation,
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
