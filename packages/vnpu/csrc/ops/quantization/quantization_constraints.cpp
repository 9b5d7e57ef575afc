// What quantization and its gated activation can be called with.
// Sources: docs of ops-nn (quant) and the pages of op-plugin.

#include "ops/dtype_lists.h"
#include "ops/quantization/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kDynamic[] = "op-plugin torch_npu-npu_dynamic_quant.md, parameters";
constexpr char kQuantize[] = "op-plugin torch_npu-npu_quantize.md, parameters";
constexpr char kAscendQuant[] = "ops-nn quant/ascend_quant_v2/docs/aclnnAscendQuantV3.md";
constexpr char kDequantBias[] = "ops-nn quant/dequant_bias/docs/aclnnDequantBias.md, constraints";
constexpr char kSwiglu[] = "op-plugin torch_npu-npu_dequant_swiglu_quant.md, constraints";
constexpr char kSwigluTiling[] = "dequant_swiglu_quant_tiling.cpp";
// op-plugin's page excludes a bias beside groups; the operator's own page and check have one.
constexpr char kSwigluBias[] = "CheckBias in dequant_swiglu_quant_tiling.cpp of ops-nn";

Check entry_for_each_row_of_x() {
  return fits("have an entry for each row of x", {"x"}, [](const RuleArguments& own) -> Found {
    const TensorView& x = own.tensor(1);
    const int64_t rows = size_of(x, -1) == 0 ? 0 : x.numel() / size_of(x, -1);
    if (own.tensor().numel() == rows) return std::nullopt;
    return "sizes " + sizes_of(own.tensor()) + " beside " + sizes_of(x);
  });
}

std::vector<Row> dynamic_rows() {
  return {
      {"x", dtype(kHalves), kDynamic},
      {"x", dims(2, 8), kDynamic},
      {"scale", dtype({at::kFloat}), kDynamic},
      {"scale", entry_for_each_row_of_x(), kDynamic},
      {"smooth", same_dtype("x"), kDynamic},
      {"y", same_sizes("x").when(has_dtype("y", {at::kChar})), kDynamic},
  };
}
std::vector<Row> asymmetric_rows() {
  std::vector<Row> rows = dynamic_rows();
  rows.push_back({"offset", dtype({at::kFloat}), kDynamic});
  rows.push_back({"offset", same_sizes("scale"), kDynamic});
  return rows;
}
}  // namespace

Allowed allowed_dynamic_quant() {
  return {{.bytes = 16 * kMiB, .copies = true}, dynamic_rows(), kBigChips};
}

Allowed allowed_dynamic_quant_v2() {
  return {{.bytes = 16 * kMiB, .copies = true}, asymmetric_rows(), kBigChips};
}

namespace {

Check one_or_axis_of(const char* other) {
  return fits("have one entry, or one for each of x's last dimension", {other},
              [](const RuleArguments& own) -> Found {
                const int64_t entries = own.tensor().numel();
                if (entries == 1 || entries == size_of(own.tensor(1), -1)) return std::nullopt;
                return "sizes " + sizes_of(own.tensor()) + " beside " + sizes_of(own.tensor(1));
              });
}

}  // namespace

Allowed allowed_quantize() {
  return {
      {.bytes = 16 * kMiB, .copies = true},
      {
          {"x", dtype({at::kFloat, at::kHalf, at::kBFloat16}), kQuantize},
          {"scales", dtype({at::kFloat, at::kBFloat16}), kQuantize},
          {"scales", dims(1, 1), kQuantize},
          {"scales", one_or_axis_of("x").when(equals("axis", std::vector<int64_t>{-1})), kQuantize},
          {"zero_points", dtype({at::kChar, at::kByte, at::kInt, at::kBFloat16}), kQuantize},
          {"zero_points", same_sizes("scales"), kQuantize},
          {"scales", dtype({at::kBFloat16}).when(has_dtype("zero_points", {at::kBFloat16})),
           kQuantize},
          {"x", dtype({at::kBFloat16}).when(has_dtype("scales", {at::kBFloat16})), kQuantize},
      },
      kBigChips};
}

Allowed allowed_ascend_quant() {
  return {{.bytes = 16 * kMiB, .copies = true},
          {
              {"x", dtype({at::kFloat, at::kHalf, at::kBFloat16}), kAscendQuant},
              {"scale", same_dtype("x"), kAscendQuant},
              {"offset", same_dtype("scale"), kAscendQuant},
              {"offset", same_sizes("scale"), kAscendQuant},
          },
          kBigChips};
}

Allowed allowed_dequant_bias() {
  return {
      {.bytes = 16 * kMiB},
      {
          {"x", dtype({at::kInt}), kDequantBias},
          {"x", dims(2, 2), kDequantBias},
          {"x", contiguous(), kDequantBias},
          {"x", size_between(0, 1, 25000), kDequantBias, {.tiling = true}},
          {"weight_scale", dtype({at::kFloat, at::kBFloat16}), kDequantBias},
          {"weight_scale", contiguous(), kDequantBias},
          {"weight_scale", dtype({at::kFloat}).when(has_dtype("out", {at::kHalf})), kDequantBias},
          {"weight_scale", dtype({at::kBFloat16}).when(has_dtype("out", {at::kBFloat16})),
           kDequantBias},
          {"weight_scale", same_size(0, "x", 1), kDequantBias},
          {"activation_scale", dtype({at::kFloat}), kDequantBias},
          {"activation_scale", contiguous(), kDequantBias},
          {"activation_scale", same_size(0, "x", 0), kDequantBias},
          {"bias", dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kInt}), kDequantBias},
          {"out", dtype({at::kHalf, at::kBFloat16}), kDequantBias},
      },
      kBigChips};
}

namespace {

Condition in_groups() { return is_given("group_index"); }
Check a_row_for_each_group() {
  return fits("have a row for each group", {"group_index"}, [](const RuleArguments& own) -> Found {
    const int64_t groups = size_of(own.tensor(1), 0);
    const TensorView& values = own.tensor();
    const int64_t rows = values.dims == 1 ? 1 : size_of(values, 0);
    if (own.tensor(1).numel() == 0 || rows == groups) return std::nullopt;
    return "sizes " + sizes_of(values) + " beside " + text(groups) + " groups";
  });
}

}  // namespace

Allowed allowed_dequant_swiglu_quant() {
  return {{.bytes = 32 * kMiB},
          {
              {"x", dtype({at::kInt, at::kHalf, at::kBFloat16}), kSwiglu},
              {"x", contiguous(), kSwiglu},
              {"x", size_between(-1, 2, 1 << 30, 2), kSwiglu},
              {"x",
               size_between(-1, 64, 1 << 30, 64).when(in_groups()),
               kSwigluTiling,
               {.tiling = true}},
              {"x",
               size_between(-1, 2, 7232).when(in_groups()),
               "aclnnDequantSwigluQuantV2.md, constraints: x's last dimension",
               {.until = CannRelease::k8_5, .tiling = true}},
              {"x",
               size_between(-1, 2, 10496).when(in_groups()),
               "op-plugin torch_npu-npu_dequant_swiglu_quant.md: x's last dimension",
               {.since = CannRelease::k9_0, .tiling = true}},
              {"weight_scale", dtype({at::kFloat}), kSwiglu},
              {"weight_scale", present().when(has_dtype("x", {at::kInt})), kSwiglu},
              {"weight_scale", same_size(-1, "x", -1), kSwiglu},
              {"weight_scale", a_row_for_each_group(), kSwiglu},
              {"activation_scale", dtype({at::kFloat}), kSwiglu},
              {"activation_scale", entry_for_each_row_of_x(), kSwiglu},
              {"group_index", dtype({at::kLong}), kSwiglu},
              {"group_index", dims(1, 1), kSwiglu},
              {"bias", dtype({at::kInt, at::kFloat, at::kHalf, at::kBFloat16}), kSwigluBias},
              {"bias", same_size(-1, "x", -1), kSwigluBias},
              {"bias", a_row_for_each_group(), kSwigluBias},
              {"quant_offset",
               absent().when(equals("quant_mode", std::vector<std::string>{"dynamic"})), kSwiglu},
              {"quant_mode", one_of(std::vector<std::string>{"", "static", "dynamic"}), kSwiglu},
              {"y", dtype({at::kChar}), kSwiglu},
          },
          kBigChips};
}

}  // namespace vnpu::ops
