// Images sampled at given places.

#include "ops/operator.h"

namespace vnpu::ops {

static Rules rules_of_grid_sampler2_d() {
  constexpr int64_t kBicubic = 2;
  return {"ops-cv image/grid_sample/docs/aclnnGridSampler2D.md, parameters",
          {{"input", {dtype({at::kFloat, at::kHalf, at::kDouble}), dims(4, 4)}},
           {"input", dtype({at::kFloat, at::kHalf}).when(equals("interpolation", kBicubic))},
           {"input", {size_between(-1, 1, 2147483647), size_between(-2, 1, 2147483647)}},
           {"grid", {same_dtype("input"), dims(4, 4), size_in(-1, {2}), same_size(0, "input", 0)}},
           {"interpolation", one_of(0, 1, kBicubic)},
           {"padding", one_of(0, 1, 2)},
           {"out",
            {same_dtype("input"), dims(4, 4), same_size(0, "input", 0), same_size(1, "input", 1),
             same_size(2, "grid", 1), same_size(3, "grid", 2)}}}};
}
// grid: [images, out height, out width, (x, y)], -1 to 1 across the image. interpolation: 0
// bilinear, 1 nearest, 2 bicubic; padding: 0 zeros, 1 the border, 2 reflection.
VNPU_OPERATOR(GridSampler2D,
              (const Tensor& input, const Tensor& grid, int64_t interpolation, int64_t padding,
               bool align_corners, Out out),
              {.tier = kOther, .cost = elements<64>, .rules = rules_of_grid_sampler2_d()}) {
  if (out.tensor.numel() == 0) return;
  store(out, at::grid_sampler_2d(widen(input), widen(grid), interpolation, padding, align_corners));
}

}  // namespace vnpu::ops
