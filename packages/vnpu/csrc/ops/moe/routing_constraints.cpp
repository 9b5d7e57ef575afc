// What the choice of experts and the order of tokens can be called with.
// Sources: docs and op_host of ops-transformer (moe), and the pages of op-plugin.

#include "ops/dtype_lists.h"
#include "ops/moe/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kInit[] = "aclnnMoeInitRoutingV3.md, parameters";
constexpr char kInitTiling[] = "moe_init_routing_v3_tiling.cpp";
constexpr char kGating[] = "aclnnMoeGatingTopK.md, constraints";
constexpr char kGatingTiling[] = "moe_gating_top_k_tiling.cpp";
constexpr char kSoftmax[] = "op-plugin torch_npu-npu_moe_gating_top_k_softmax.md, parameters";
constexpr char kDispatch[] = "aclnnMoeDistributeDispatchV2.md, parameters";
constexpr char kCombine[] = "aclnnMoeDistributeCombineV2.md, parameters";
constexpr char kFinalize[] = "op-plugin torch_npu-npu_moe_finalize_routing.md, parameters";
constexpr char kReRouting[] = "op-plugin torch_npu-npu_moe_re_routing.md, parameters";

std::string range_text(const std::vector<int64_t>& range) {
  std::string shown = "value [";
  for (size_t i = 0; i < range.size(); ++i) shown += (i > 0 ? ", " : "") + text(range[i]);
  return shown + "]";
}

}  // namespace

// What depends on the group, or on several numbers at once, is refused by distribute_limits.cpp.
Allowed allowed_moe_distribute_dispatch() {
  return {{},
          {{"x", dtype(kHalves), kDispatch},
           {"x", dims(2, 2), kDispatch},
           {"expert_ids", dtype({at::kInt}), kDispatch},
           {"expert_ids", dims(2, 2), kDispatch},
           {"expert_ids", same_size(0, "x", 0), kDispatch},
           {"smooth", dtype({at::kFloat}), kDispatch},
           {"smooth", dims(2, 2), kDispatch},
           {"active", dtype({at::kBool}), kDispatch},
           {"weights", dtype({at::kFloat}), kDispatch},
           {"quant_mode", one_of(std::vector<int64_t>{0, 2}), kDispatch},
           {"counts_type", one_of(std::vector<int64_t>{0, 1}), kDispatch},
           {"rows", dims(2, 2), kDispatch},
           {"row_scales", dtype({at::kFloat}), kDispatch},
           {"tokens_per_expert", dtype({at::kLong}), kDispatch},
           {"ends", dtype({at::kInt}), kDispatch}},
          kBigChips};
}

Allowed allowed_moe_distribute_combine() {
  return {{},
          {{"rows", dtype(kHalves), kCombine},
           {"rows", dims(2, 2), kCombine},
           {"expert_ids", dtype({at::kInt}), kCombine},
           {"expert_ids", dims(2, 2), kCombine},
           {"ends", dtype({at::kInt}), kCombine},
           {"weights", dtype({at::kFloat}), kCombine},
           {"weights", dims(2, 2), kCombine},
           {"weights", same_sizes("expert_ids"), kCombine},
           {"active", dtype({at::kBool}), kCombine},
           {"quant_mode", one_of(std::vector<int64_t>{0, 2}), kCombine},
           {"sums", same_dtype("rows"), kCombine},
           {"sums", dims(2, 2), kCombine}},
          kBigChips};
}

Allowed allowed_moe_init_routing_v3() {
  return {
      {.bytes = 32 * kMiB, .copies = true},
      {
          {"x", dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kChar}), kInit},
          {"x", dims(2, 2), kInit},
          {"expert_index", dtype({at::kInt}), kInit},
          {"expert_index", dims(2, 2), kInit},
          {"expert_index", same_size(0, "x", 0), kInit},
          {"active_rows",
           that("be the number of assignments, or -1 for all", {"expert_index"},
                [](const RuleArguments& own) -> Found {
                  const int64_t rows = own.tensor(1).numel();
                  if (own.integer() == rows || own.integer() == -1) return std::nullopt;
                  return "value " + text(own.integer()) + " beside " + text(rows) + " assignments";
                }),
           kInitTiling,
           {.until = CannRelease::k8_5, .tiling = true}},
          {"drop_pad_mode",
           one_of(std::vector<int64_t>{0}),
           kInitTiling,
           {.until = CannRelease::k8_3, .tiling = true}},
          {"drop_pad_mode", one_of(std::vector<int64_t>{0, 1}), kInit},
          {"count_form",
           one_of(std::vector<int64_t>{1, 2}),
           kInitTiling,
           {.until = CannRelease::k8_3, .tiling = true}},
          {"count_form", one_of(std::vector<int64_t>{0, 1, 2}), kInit},
          {"wants_counts",
           one_of(std::vector<int64_t>{1}),
           kInitTiling,
           {.until = CannRelease::k8_5, .tiling = true}},
          {"quant_mode",
           one_of(std::vector<int64_t>{-1, 1}),
           kInitTiling,
           {.until = CannRelease::k8_3, .tiling = true}},
          {"quant_mode", one_of(std::vector<int64_t>{-1, 0, 1}), kInit},
          {"row_index_type", one_of(std::vector<int64_t>{0, 1}), kInit},
          {"active_range",
           that("be two numbers, from 0 to expertNum, the first below the second", {"experts"},
                [](const RuleArguments& own) -> Found {
                  const std::vector<int64_t>& range = own.integers();
                  if (range.size() == 2 && range[0] >= 0 && range[0] < range[1] &&
                      range[1] <= own.integer(1)) {
                    return std::nullopt;
                  }
                  return range_text(range) + " beside " + text(own.integer(1)) + " experts";
                }),
           kInit},
          {"active_range",
           that("end at 10240 or before", {},
                [](const RuleArguments& own) -> Found {
                  if (own.integers().size() != 2 || own.integers()[1] <= 10240) return std::nullopt;
                  return range_text(own.integers());
                }),
           kInitTiling,
           {.tiling = true}},
          {"scale", dtype({at::kFloat}), kInit},
          {"scale",
           fits("be [experts of the range, H]", {"x", "active_range", "quant_mode"},
                [](const RuleArguments& own) -> Found {
                  const TensorView& scale = own.tensor();
                  const std::vector<int64_t>& range = own.integers(2);
                  if (own.integer(3) != 1 || range.size() != 2) return std::nullopt;
                  const bool rows =
                      size_of(scale, 0) == range[1] - range[0] || size_of(scale, 0) == 1;
                  if (scale.dims == 2 && rows && size_of(scale, 1) == size_of(own.tensor(1), 1)) {
                    return std::nullopt;
                  }
                  return "sizes " + sizes_of(scale);
                }),
           kInit},
          {"counts_out", dtype({at::kLong}), kInit},
          {"row_index_out", dtype({at::kInt}), kInit},
      },
      kBigChips};
}

Allowed allowed_moe_gating_top_k() {
  return {
      {.bytes = 16 * kMiB, .copies = true},
      {
          {"x", dtype(kFloats), kGating},
          {"x", dims(2, 2), kGating},
          {"x", size_between(-1, 1, 2048), kGating, {.tiling = true}},
          {"bias", same_dtype("x"), kGating},
          {"bias", dims(1, 1), kGating},
          {"bias", same_size(0, "x", 1), kGating},
          {"y", same_dtype("x"), kGating},
          {"groups",
           fits("divide the experts", {"x"},
                [](const RuleArguments& own) -> Found {
                  const int64_t experts = size_of(own.tensor(1), -1);
                  if (own.integer() >= 1 && experts % own.integer() == 0) return std::nullopt;
                  return "value " + text(own.integer()) + " beside " + text(experts) + " experts";
                }),
           kGating},
          {"groups",
           that("leave more experts to each group than groupSelectMode", {"x", "group_score"},
                [](const RuleArguments& own) -> Found {
                  const int64_t experts = size_of(own.tensor(1), -1);
                  if (own.integer() <= 1 || experts / own.integer() > own.integer(2)) {
                    return std::nullopt;
                  }
                  return "value " + text(own.integer()) + " beside " + text(experts) + " experts";
                }),
           kGatingTiling,
           {.tiling = true}},
          {"groups",
           that("have at most 2048 experts when those of each group are rounded up to 32", {"x"},
                [](const RuleArguments& own) -> Found {
                  const int64_t groups = own.integer();
                  if (groups <= 1) return std::nullopt;
                  const int64_t each = size_of(own.tensor(1), -1) / groups;
                  if ((each + 31) / 32 * 32 * groups <= 2048) return std::nullopt;
                  return "value " + text(groups) + " beside " + sizes_of(own.tensor(1));
                }),
           kGatingTiling,
           {.tiling = true}},
          {"chosen_groups",
           that("be 1 to groupCount", {"groups"},
                [](const RuleArguments& own) -> Found {
                  if (own.integer() >= 1 && own.integer() <= own.integer(1)) return std::nullopt;
                  return "value " + text(own.integer()) + " of " + text(own.integer(1)) + " groups";
                }),
           kGating},
          {"k",
           that("be 1 to the experts of the chosen groups", {"x", "groups", "chosen_groups"},
                [](const RuleArguments& own) -> Found {
                  const int64_t groups = std::max<int64_t>(1, own.integer(2));
                  const int64_t experts = size_of(own.tensor(1), -1) / groups * own.integer(3);
                  if (own.integer() >= 1 && own.integer() <= experts) return std::nullopt;
                  return "value " + text(own.integer()) + " of " + text(experts) + " experts";
                }),
           kGating},
          {"renormalize", one_of(std::vector<int64_t>{0}), kGating, {.tiling = true}},
          {"activation", one_of(std::vector<int64_t>{0, 1}), kGating},
          {"group_score", one_of(std::vector<int64_t>{0, 1}), kGating},
          {"expert_index", dtype({at::kInt}), kGating},
          {"scores", dtype({at::kFloat}), kGating},
      },
      kBigChips};
}

Allowed allowed_moe_gating_top_k_softmax_v2() {
  return {{.bytes = 16 * kMiB, .copies = true},
          {
              {"x", dtype(kFloats), kSoftmax},
              {"x", dims(2, 3), kSoftmax},
              {"finished", dtype({at::kBool}), kSoftmax},
              {"k",
               that("be 1 to 1024, at most the experts", {"x"},
                    [](const RuleArguments& own) -> Found {
                      const int64_t experts = size_of(own.tensor(1), -1);
                      if (own.integer() >= 1 && own.integer() <= std::min<int64_t>(1024, experts)) {
                        return std::nullopt;
                      }
                      return "value " + text(own.integer()) + " of " + text(experts) + " experts";
                    }),
               kSoftmax},
              {"renormalize", one_of(std::vector<int64_t>{0, 1}), kSoftmax},
              {"y", same_dtype("x"), kSoftmax},
              {"expert_index", dtype({at::kInt}), kSoftmax},
              {"softmax_out", dtype({at::kFloat}), kSoftmax},
          },
          kBigChips};
}

Allowed allowed_moe_finalize_routing_v2() {
  return {
      {.bytes = 16 * kMiB, .copies = true},
      {
          {"rows", dtype(kFloats), kFinalize},
          {"rows", dims(2, 2).when(equals("drop_pad_mode", std::vector<int64_t>{0, 2})), kFinalize},
          {"rows", dims(3, 3).when(equals("drop_pad_mode", std::vector<int64_t>{1, 3})), kFinalize},
          {"drop_pad_mode", one_of(std::vector<int64_t>{0, 1, 2, 3}), kFinalize},
          {"row_index", dtype({at::kInt}), kFinalize},
          {"row_index", dims(1, 1), kFinalize},
          {"scales", dims(2, 2), kFinalize},
          {"scales",
           that("have the dtype of rows, or be float32 beside bfloat16", {"rows"},
                [](const RuleArguments& own) -> Found {
                  const ScalarType type = own.tensor().dtype;
                  const ScalarType rows = own.tensor(1).dtype;
                  if (type == rows || (type == at::kFloat && rows == at::kBFloat16)) {
                    return std::nullopt;
                  }
                  return "dtype " + name_of(type) + " beside " + name_of(rows);
                }),
           "moe_finalize_routing_v2_tiling.cpp"},
          {"scales",
           fits("have an entry for each of the row index", {"row_index"},
                [](const RuleArguments& own) -> Found {
                  if (own.tensor().numel() == own.tensor(1).numel()) return std::nullopt;
                  return "sizes " + sizes_of(own.tensor()) + " beside " + sizes_of(own.tensor(1));
                }),
           kFinalize},
          {"skip1", same_dtype("rows"), kFinalize},
          {"skip2", absent().when(is_missing("skip1")), kFinalize},
          {"skip2", same_dtype("rows"), kFinalize},
          {"bias", same_dtype("rows"), kFinalize},
          {"expert_index", present().when(is_given("bias")), kFinalize},
          {"expert_index", dtype({at::kInt}), kFinalize},
          {"out", same_dtype("rows"), kFinalize},
      },
      kBigChips};
}

namespace {

// kReRouting wants counts above 0, which its own example does not keep: it writes zeros when tokens
// run out. Neither README of the operator nor its checks limit them, and its kernel moves nothing
// for a count of 0 (moe_re_routing.h, Process), so there is no row. They would be on the device.
}  // namespace

Allowed allowed_moe_re_routing() {
  return {{.bytes = 16 * kMiB, .copies = true},
          {
              {"tokens", dtype({at::kHalf, at::kBFloat16, at::kChar}), kReRouting},
              {"tokens", dims(2, 2), kReRouting},
              {"tokens", size_between(1, 1, 16383), kReRouting, {.tiling = true}},
              {"counts", dtype({at::kInt, at::kLong}), kReRouting},
              {"counts", dims(2, 2), kReRouting},
              {"scales", dtype({at::kFloat}), kReRouting},
              {"scales", dims(1, 1), kReRouting},
              {"scales", same_size(0, "tokens", 0), kReRouting},
              {"count_form", one_of(std::vector<int64_t>{1}), kReRouting, {.tiling = true}},
              {"index_type", one_of(std::vector<int64_t>{0}), kReRouting, {.tiling = true}},
              {"index_out", dtype({at::kInt}), kReRouting},
              {"counts_out", same_dtype("counts"), kReRouting},
          },
          kBigChips};
}

}  // namespace vnpu::ops
