// What norms and gated activations can be called with.
// Sources: docs of ops-nn (norm, activation, index) and the pages of op-plugin.

#include "ops/dtype_lists.h"
#include "ops/reduction/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kRmsNorm[] = "ops-nn norm/rms_norm/docs/aclnnRmsNorm.md, parameters";
constexpr char kRmsNorm310P[] = "ops-nn norm/rms_norm/docs/aclnnRmsNorm.md, constraints of 310P";
constexpr char kAddRmsNorm[] = "ops-nn norm/add_rms_norm/docs/aclnnAddRmsNorm.md, parameters";
constexpr char kLayerNorm[] = "CheckDtypeValid, CheckShape in aclnn_layer_norm.cpp of ops-nn";
constexpr char kSwiGlu[] = "ops-nn activation/swi_glu/docs/aclnnSwiGlu.md, parameters";

Check trailing_dimensions_of(const char* other) {
  return fits(std::string("have the trailing sizes of ") + other, {other},
              [](const RuleArguments& own) -> Found {
                const TensorView& gamma = own.tensor();
                const TensorView& x = own.tensor(1);
                bool same = gamma.dims <= x.dims;
                for (int i = 1; same && i <= gamma.dims; ++i) {
                  same = size_of(gamma, -i) == size_of(x, -i);
                }
                if (same) return std::nullopt;
                return "sizes " + sizes_of(gamma) + " beside " + sizes_of(x);
              });
}

}  // namespace

Allowed allowed_rms_norm() {
  return {{.bytes = 16 * kMiB, .copies = true},
          {
              {"x", dtype(kFloats), kRmsNorm},
              {"x", dtype({at::kFloat, at::kHalf}), kRmsNorm310P, {.chips = k310P}},
              {"x",
               that("have a last dimension of at least 32 bytes", {},
                    [](const RuleArguments& own) -> Found {
                      const TensorView& x = own.tensor();
                      if (size_of(x, -1) * static_cast<int64_t>(at::elementSize(x.dtype)) >= 32) {
                        return std::nullopt;
                      }
                      return "sizes " + sizes_of(x) + " of " + name_of(x.dtype);
                    }),
               kRmsNorm310P,
               {.chips = k310P, .tiling = true}},
              {"x", dims(1, 8), kRmsNorm},
              {"gamma", dtype(kFloats), kRmsNorm},
              {"gamma", trailing_dimensions_of("x"), kRmsNorm},
              {"y", same_dtype("x"), kRmsNorm},
              {"y", same_sizes("x"), kRmsNorm},
              {"rstd", dtype({at::kFloat}), kRmsNorm},
          }};
}

Allowed allowed_add_rms_norm() {
  return {{.bytes = 16 * kMiB, .copies = true},
          {
              {"x1", dtype(kFloats), kAddRmsNorm},
              {"x1", dtype({at::kFloat, at::kHalf}), kAddRmsNorm, {.chips = k310P}},
              {"x1",
               not_empty(),
               "op-plugin torch_npu-npu_add_rms_norm.md, constraints",
               {.until = CannRelease::k8_5, .tiling = true}},
              {"x2", same_dtype("x1"), kAddRmsNorm},
              {"x2", same_sizes("x1"), kAddRmsNorm},
              {"gamma", same_dtype("x1"), kAddRmsNorm},
              {"gamma", trailing_dimensions_of("x1"), kAddRmsNorm},
              {"y", same_dtype("x1"), kAddRmsNorm},
              {"x", same_dtype("x1"), kAddRmsNorm},
              {"rstd", dtype({at::kFloat}), kAddRmsNorm},
          }};
}

Allowed allowed_add_rms_norm_dynamic_quant() {
  static constexpr char kDocument[] =
      "ops-nn norm/add_rms_norm_dynamic_quant/docs/aclnnAddRmsNormDynamicQuantV2.md, parameters";
  return {.rows =
              {
                  {"x1", dtype(kHalves), kDocument},
                  {"x1", dims(2, 8), kDocument},
                  {"x2", same_dtype("x1"), kDocument},
                  {"x2", same_sizes("x1"), kDocument},
                  {"gamma", same_dtype("x1"), kDocument},
                  {"gamma", dims(1, 1), kDocument},
                  {"gamma", trailing_dimensions_of("x1"), kDocument},
                  {"smooth_scale1", same_dtype("gamma"), kDocument},
                  {"smooth_scale1", same_sizes("gamma"), kDocument},
                  {"smooth_scale2", same_dtype("gamma"), kDocument},
                  {"smooth_scale2", same_sizes("gamma"), kDocument},
                  {"beta", same_dtype("gamma"), kDocument},
                  {"beta", same_sizes("gamma"), kDocument},
                  {"x", same_dtype("x1"), kDocument},
                  {"x", same_sizes("x1"), kDocument},
                  {"scale1", dtype({at::kFloat}), kDocument},
                  {"scale2", dtype({at::kFloat}), kDocument},
              },
          .chips = kBigChips};
}

Allowed allowed_layer_norm() {
  return {{},
          {
              {"input", dtype(kFloats), kLayerNorm},
              {"input", dtype({at::kFloat, at::kHalf}), kLayerNorm, {.chips = k310P}},
              {"weight", dtype(kFloats), kLayerNorm},
              {"bias", dtype(kFloats), kLayerNorm},
              {"weight", same_dtype("bias"), kLayerNorm},
              {"weight", trailing_dimensions_of("input"), kLayerNorm},
              {"bias", trailing_dimensions_of("input"), kLayerNorm},
              {"out", dtype(kFloats), kLayerNorm},
              {"out", same_sizes("input"), kLayerNorm},
          }};
}

Allowed allowed_swi_glu() {
  return {{.bytes = 16 * kMiB},
          {
              {"x", dtype(kFloats), kSwiGlu},
              {"x", dtype({at::kFloat, at::kHalf}), kSwiGlu, {.chips = k310P}},
              {"x", contiguous(), kSwiGlu},
              {"x", not_empty(), kSwiGlu, {.chips = k310P}},
              {"x",
               fits("have an even size in dimension dim", {"dim"},
                    [](const RuleArguments& own) -> Found {
                      const int64_t size = size_of(own.tensor(), static_cast<int>(own.integer(1)));
                      if (size % 2 == 0) return std::nullopt;
                      return "sizes " + sizes_of(own.tensor()) + " beside dim " +
                             text(own.integer(1));
                    }),
               kSwiGlu},
              {"out", same_dtype("x"), kSwiGlu},
              {"out", contiguous(), kSwiGlu},
          }};
}

}  // namespace vnpu::ops
