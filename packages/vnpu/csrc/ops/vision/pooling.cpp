// Pooling and resampling of images [N, C, H, W] or [C, H, W].

#include "ops/operator.h"
#include "ops/shared_rules.h"

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
static Rules rules_of_upsample_bilinear2d() {
  return {
      "ops-cv image/upsample_bilinear2d/docs/aclnnUpsampleBilinear2d.md, parameters; "
      "CheckFormat in aclnn_upsample_bilinear_2d.cpp: float64 in NHWC only",
      {{"self", {dims(4, 4), not_empty()}},
       {"self", dtype(kFloats), kOnBigChips},
       {"self", dtype({at::kFloat, at::kHalf}), {.chips = k310P}},
       {"output_size", fits("be the last two sizes of out", {"out"},
                            [](const RuleArguments& own) {
                              const TensorView& out = own.tensor(1);
                              return own.integers() ==
                                     std::vector{size_of(out, -2), size_of(out, -1)};
                            })},
       {"scales_h, scales_w",
        that("not be negative", {}, [](const RuleArguments& own) { return own[0].real >= 0; })},
       {"out",
        {same_dtype("self"), dims(4, 4), not_empty(), same_size(0, "self", 0),
         same_size(1, "self", 1)}}}};
}
VNPU_OPERATOR(UpsampleBilinear2d,
              (const Tensor& self, const IntArray& output_size, bool align_corners, double scales_h,
               double scales_w, Out out),
              {.cost = elements<8>, .rules = rules_of_upsample_bilinear2d()}) {
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
