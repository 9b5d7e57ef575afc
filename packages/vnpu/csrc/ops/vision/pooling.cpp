// Pooling and resampling of images [N, C, H, W] or [C, H, W].

#include "ops/operator.h"

namespace vnpu::ops {
namespace {

// torch_npu sends 0 or -1 for a scale that was not given.
std::optional<double> given(double scale) {
  return scale > 0 ? std::optional<double>(scale) : std::nullopt;
}

}  // namespace

VNPU_OPERATOR(AdaptiveAvgPool2d, (const Tensor& self, const IntArray& output_size, Out out),
              {.cost = elements<8>}) {
  store(out, at::adaptive_avg_pool2d(widen(self), output_size));
}
// divisorOverride 0: the size of the window.
VNPU_OPERATOR(AvgPool2d,
              (const Tensor& self, const IntArray& kernel_size, const IntArray& strides,
               const IntArray& paddings, bool ceil_mode, bool count_include_pad,
               int64_t divisor_override, int8_t, Out out),
              {.cost = elements<8>,
               .rules = {"DIM_NUM_3D, DIM_NUM_4D in aclnn_avgpool2d.cpp",
                         {{"self", dims(3, 4)}}}}) {
  store(out, at::avg_pool2d(
                 widen(self), kernel_size, strides, paddings, ceil_mode, count_include_pad,
                 divisor_override == 0 ? std::nullopt : std::optional<int64_t>(divisor_override)));
}
VNPU_OPERATOR(UpsampleBilinear2d,
              (const Tensor& self, const IntArray& output_size, bool align_corners, double scales_h,
               double scales_w, Out out),
              {.cost = elements<8>}) {
  store(out, at::upsample_bilinear2d(widen(self), output_size, align_corners, given(scales_h),
                                     given(scales_w)));
}
VNPU_OPERATOR(UpsampleBicubic2d,
              (const Tensor& self, const IntArray& output_size, bool align_corners, double scales_h,
               double scales_w, Out out),
              {.cost = elements<8>}) {
  store(out, at::upsample_bicubic2d(widen(self), output_size, align_corners, given(scales_h),
                                    given(scales_w)));
}
VNPU_OPERATOR(UpsampleNearest2dV2,
              (const Tensor& self, const IntArray& output_size, float scales_h, float scales_w,
               Out out),
              {.cost = elements<8>}) {
  store(out, at::upsample_nearest2d(self, output_size, given(scales_h), given(scales_w)));
}
VNPU_OPERATOR(UpsampleLinear1d,
              (const Tensor& self, const IntArray& output_size, bool align_corners, double scales,
               Out out),
              {.tier = kOther, .cost = elements<8>}) {
  store(out, at::upsample_linear1d(widen(self), output_size, align_corners, given(scales)));
}
VNPU_OPERATOR(UpsampleNearest2d, (const Tensor& self, const IntArray& output_size, Out out),
              {.cost = elements<8>}) {
  store(out, at::upsample_nearest2d(self, output_size));
}

}  // namespace vnpu::ops
