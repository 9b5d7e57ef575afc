// Images sampled at given places.

#include "ops/operator.h"

namespace vnpu::ops {

static Allowed allowed_grid_sampler2_d() {
  static constexpr char kDocument[] =
      "ops-cv image/grid_sample/docs/aclnnGridSampler2D.md, parameters";
  constexpr int64_t kBicubic = 2;
  return {.rows = {
              {"input", dtype({at::kFloat, at::kHalf, at::kDouble}), kDocument},
              {"input", dims(4, 4), kDocument},
              {"input",
               dtype({at::kFloat, at::kHalf})
                   .when(equals("interpolation", std::vector<int64_t>{kBicubic})),
               kDocument},
              {"input", size_between(-1, 1, 2147483647), kDocument},
              {"input", size_between(-2, 1, 2147483647), kDocument},
              {"grid", same_dtype("input"), kDocument},
              {"grid", dims(4, 4), kDocument},
              {"grid", size_in(-1, {2}), kDocument},
              {"grid", same_size(0, "input", 0), kDocument},
              {"interpolation", one_of(std::vector<int64_t>{0, 1, kBicubic}), kDocument},
              {"padding", one_of(std::vector<int64_t>{0, 1, 2}), kDocument},
              {"out", same_dtype("input"), kDocument},
              {"out", dims(4, 4), kDocument},
              {"out", same_size(0, "input", 0), kDocument},
              {"out", same_size(1, "input", 1), kDocument},
              {"out", same_size(2, "grid", 1), kDocument},
              {"out", same_size(3, "grid", 2), kDocument},
          }};
}
// grid: [images, out height, out width, (x, y)], -1 to 1 across the image. interpolation: 0
// bilinear, 1 nearest, 2 bicubic; padding: 0 zeros, 1 the border, 2 reflection.
VNPU_OPERATOR(GridSampler2D,
              (const Tensor& input, const Tensor& grid, int64_t interpolation, int64_t padding,
               bool align_corners, Out out),
              {.cost = elements<64>, .allowed = allowed_grid_sampler2_d}) {
  if (out.tensor.numel() == 0) return;
  store(out, at::grid_sampler_2d(widen(input), widen(grid), interpolation, padding, align_corners));
}

}  // namespace vnpu::ops
