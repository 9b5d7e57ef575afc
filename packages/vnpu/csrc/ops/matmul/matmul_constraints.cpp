// What matrix products can be called with, in floats and in integers.
// Sources: docs of ops-nn (matmul) and ops-transformer (gmm), and the pages of op-plugin.

#include <limits>

#include "ops/dtype_lists.h"
#include "ops/matmul/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kAddLora[] =
    "ops-transformer posembedding/add_lora/docs/aclnnAddLora.md, constraints";
constexpr char kMm[] = "ops-nn matmul/mat_mul_v3/docs/aclnnMm.md, parameters";
// The documents exclude bfloat16 beside float32; the library casts either to float32, and
// quantizers rely on it.
constexpr char kPromotion[] = "Dav2201MatMulRule in matmul_util.cpp of ops-nn";
constexpr char kTransposed[] =
    "ops-nn matmul/transpose_batch_mat_mul/docs/aclnnTransposeBatchMatMul.md, constraints";
constexpr char kQuant[] = "op-plugin torch_npu-npu_quant_matmul.md, constraints";
constexpr char kQuantGroups[] =
    "ops-nn matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md, K-G";
constexpr char kQuantBlocks[] =
    "ops-nn matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md, G-B";
constexpr char kQuantNz[] =
    "ops-nn matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulWeightNz.md, constraints";
constexpr char kGrouped[] = "op-plugin torch_npu-npu_grouped_matmul.md, constraints";
constexpr char kGroupedCheck[] = "CheckQuantParamsDtype in aclnn_grouped_matmul.cpp";
constexpr char kGroupedWeightOnly[] = "CheckGroupedMatmulAntiQuant in aclnn_grouped_matmul.cpp";
constexpr char kGroupedHalves[] =
    "ops-transformer gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md, A8W4";
// The page knows groups of 256 only; the host code takes any that divide the depth, and one scale.
constexpr char kGroupedHalvesTiling[] = "A8W4Tiling in grouped_matmul_tiling.cpp";
constexpr char kGroupedNz[] = "aclnnGroupedMatmulWeightNz in aclnn_grouped_matmul.cpp";

constexpr int32_t kFractal = 29;  // ACL_FORMAT_FRACTAL_NZ
constexpr int64_t kMostInner = 65535;

Check no_mix_with(const char* other) {
  return that(
      std::string("have the dtype of ") + other, {other}, [](const RuleArguments& own) -> Found {
        if (own.tensor().dtype == own.tensor(1).dtype) return std::nullopt;
        return "dtype " + name_of(own.tensor().dtype) + " beside " + name_of(own.tensor(1).dtype);
      });
}

Check inner_sizes_agree(const char* other) {
  return fits(std::string("have the inner size of ") + other, {other},
              [](const RuleArguments& own) -> Found {
                if (size_of(own.tensor(), -2) == size_of(own.tensor(1), -1)) return std::nullopt;
                return "sizes " + sizes_of(own.tensor()) + " beside " + sizes_of(own.tensor(1));
              });
}

std::vector<Row> product_rows(const char* a, const char* b, int64_t dimensions) {
  return {
      {a, dtype(kFloats), kMm},
      {a, dtype({at::kFloat, at::kHalf}), kMm, {.chips = k310P}},
      {b, dtype(kFloats), kPromotion},
      {b, dtype({at::kFloat, at::kHalf}), kMm, {.chips = k310P}},
      {a, dims(dimensions, dimensions), kMm},
      {b, dims(dimensions, dimensions), kMm},
      {b, inner_sizes_agree(a), kMm},
  };
}
}  // namespace

Allowed allowed_add_lora() {
  static constexpr char kDocument[] = "op-plugin torch_npu-npu_batch_gather_matmul.md, parameters";
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  return {.rows =
              {
                  {"y", dtype({at::kHalf}), kDocument},
                  {"y", dims(2, 2), kDocument},
                  {"x", dtype({at::kHalf}), kDocument},
                  {"x", dims(2, 2), kDocument},
                  {"x", size_between(1, 16, kAny, 16), kDocument},
                  {"x", same_size(0, "y", 0), kDocument},
                  {"weight_b", dtype({at::kHalf}), kDocument},
                  {"weight_b", dims(4, 4), kDocument},
                  {"weight_b", size_between(0, 1, 32), kAddLora},
                  {"weight_b", size_between(2, 16, kAny, 16), kDocument},
                  {"indices", dtype({at::kInt}), kDocument},
                  {"indices", dims(1, 1), kDocument},
                  {"indices", same_size(0, "y", 0), kDocument},
                  {"weight_a", dtype({at::kHalf}), kDocument},
                  {"weight_a", dims(4, 4), kDocument},
                  {"weight_a", size_between(2, 16, 128, 16), kDocument},
                  {"weight_a", same_size(0, "weight_b", 0), kDocument},
                  {"weight_a", same_size(1, "weight_b", 1), kDocument},
                  {"weight_a", same_size(2, "weight_b", 3), kDocument},
                  {"weight_a", same_size(3, "x", 1), kDocument},
                  {"weight_b", same_size(3, "x", 1).when(is_missing("weight_a")), kDocument},
                  {"out", same_dtype("y"), kDocument},
                  {"out", same_sizes("y"), kDocument},
              },
          .chips = kA2 | k310P};
}

Allowed allowed_mm() {
  return {{.bytes = 20 * kMiB, .copies = true}, product_rows("self", "mat2", 2)};
}

Allowed allowed_batch_mat_mul() {
  return {{.bytes = 20 * kMiB, .copies = true}, product_rows("self", "mat2", 3)};
}

Allowed allowed_matmul() {
  return {{.bytes = 20 * kMiB, .copies = true},
          {
              {"self", dtype(kFloats), kMm},
              {"mat2", dtype(kFloats), kPromotion},
          }};
}

Allowed allowed_addmm() {
  return {{.bytes = 20 * kMiB, .copies = true}, product_rows("mat1", "mat2", 2)};
}

namespace {

using Order = std::vector<int64_t>;

Check order(std::vector<Order> allowed, std::string rule) {
  return that(std::move(rule), {},
              [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
                const Order& seen = own.integers();
                for (const Order& each : allowed) {
                  if (seen == each) return std::nullopt;
                }
                std::string shown = "value";
                for (const int64_t dimension : seen) shown += " " + text(dimension);
                return shown;
              });
}

}  // namespace

Allowed allowed_transpose_batch_mat_mul() {
  return {
      {.bytes = 24 * kMiB, .copies = true},
      {
          {"x1", dtype(kFloats), kTransposed},
          {"x2", no_mix_with("x1"), kTransposed},
          {"x1", dims(3, 3), kTransposed},
          {"x2", dims(3, 3), kTransposed},
          {"permute_x1", order({{0, 1, 2}, {1, 0, 2}}, "be 0 1 2 or 1 0 2"), kTransposed},
          {"permute_x2", order({{0, 1, 2}}, "be 0 1 2"), kTransposed, {.until = CannRelease::k8_5}},
          {"permute_x2",
           order({{0, 1, 2}, {0, 2, 1}}, "be 0 1 2 or 0 2 1"),
           kTransposed,
           {.since = CannRelease::k9_0}},
          {"permute_y", order({{1, 0, 2}}, "be 1 0 2"), kTransposed},
          {"x2", size_between(0, 1, 65535), kTransposed, {.tiling = true}},
          {"x2", size_between(1, 16, 65535, 16), kTransposed, {.tiling = true}},
          {"x2", size_between(2, 16, 65535, 16), kTransposed, {.tiling = true}},
          {"x1",
           that("have rows of fewer than 65536 entries, over all heads where tokens come first",
                {"permute_x1"},
                [](const RuleArguments& own) -> Found {
                  const TensorView& x = own.tensor();
                  const Order& permute = own.integers(1);
                  const bool tokens_first = !permute.empty() && permute[0] == 1;
                  const int64_t row = size_of(x, 2) * (tokens_first ? size_of(x, 1) : 1);
                  if (row < 65536) return std::nullopt;
                  return "sizes " + sizes_of(x);
                }),
           kTransposed,
           {.until = CannRelease::k8_5, .tiling = true}},
          {"bias", absent(), kTransposed},
          {"scale", dtype({at::kLong, at::kUInt64}), kTransposed},
          {"out", same_dtype("x1").when(is_missing("scale")), kTransposed},
      },
      kBigChips};
}

namespace {

// --- quantized products ------------------------------------------------------------------------

// 8-bit rows beside 4-bit weights, which lie in int32.
bool has_halves(const RuleArguments& own) {
  return own.has(0) && own.has(1) && own.tensor(0).dtype == at::kChar &&
         own.tensor(1).dtype == at::kInt;
}
Condition is_mixed() { return {"x1 is int8 and x2 int4", {"x1", "x2"}, has_halves}; }
Condition is_not_mixed() {
  return {"x2 is not int4 beside int8", {"x1", "x2"}, [](const RuleArguments& own) {
            return !has_halves(own);
          }};
}
// Scales of x1 for blocks of its rows.
Condition has_blocks() {
  return {"x1_scale has columns", {"x1_scale"}, [](const RuleArguments& own) {
            return own.has() && own.tensor().dims == 2 && size_of(own.tensor(), 1) > 1;
          }};
}
Check is(bool value) {
  return that(value ? "be true" : "be false", {}, [value](const RuleArguments& own) -> Found {
    if ((own.integer() != 0) == value) return std::nullopt;
    return value ? "false" : "true";
  });
}
// An entry for each block of a matrix, those at its edges among them.
Check blocks_of(const char* matrix, int64_t rows, int64_t columns) {
  return fits("have an entry for each " + (rows == 1 ? "" : text(rows) + " rows by ") +
                  text(columns) + " columns of " + matrix,
              {matrix}, [rows, columns](const RuleArguments& own) -> Found {
                const TensorView& x = own.tensor(1);
                if (size_of(own.tensor(), -2) == (size_of(x, -2) + rows - 1) / rows &&
                    size_of(own.tensor(), -1) == (size_of(x, -1) + columns - 1) / columns) {
                  return std::nullopt;
                }
                return "sizes " + sizes_of(own.tensor()) + " beside " + sizes_of(x);
              });
}

// Of products that take scales along the depth: of rows and weights of different widths, or of
// blocks of both.
std::vector<Row> grouped_scale_rows() {
  constexpr int64_t kBlocks = (INT64_C(1) << 32) + (128 << 16) + 128;
  return {
      {"x1_scale", present().when(is_mixed()), kQuantGroups},
      {"x2_scale", dtype({at::kLong, at::kUInt64}).when(is_mixed()), kQuantGroups},
      {"y_offset", present().when(is_mixed()), kQuantGroups},
      {"y_offset", dtype({at::kFloat}).when(is_mixed()), kQuantGroups},
      {"y_offset", same_size(-1, "out", -1).when(is_mixed()), kQuantGroups},
      {"bias", absent().when(is_mixed()), kQuantGroups},
      {"transpose1", is(false).when(is_mixed()), kQuantGroups},
      {"x1", size_between(-1, 256, 29575, 256).when(is_mixed()), kQuantGroups},
      {"x1_scale", blocks_of("x1", 1, 128).when(has_blocks()), kQuantBlocks},
      {"x2_scale", dtype({at::kFloat}).when(has_blocks()), kQuantBlocks},
      {"x2_scale", blocks_of("x2", 128, 128).when(has_blocks()), kQuantBlocks},
      {"x1", dtype({at::kChar}).when(has_blocks()), kQuantBlocks},
      {"x1", size_between(-1, 512, kMostInner, 512).when(has_blocks()), kQuantBlocks},
      {"x2", size_between(-2, 256, std::numeric_limits<int64_t>::max(), 256).when(has_blocks()),
       kQuantBlocks},
      {"transpose1", is(false).when(has_blocks()), kQuantBlocks},
      {"transpose2", is(true).when(has_blocks()), kQuantBlocks},
      {"group_size", one_of(std::vector<int64_t>{kBlocks}).when(has_blocks()), kQuantBlocks},
      {"bias", dtype({at::kFloat}).when(has_blocks()), kQuantBlocks},
      {"out", dtype({at::kBFloat16}).when(has_blocks()), kQuantBlocks},
  };
}

std::vector<Row> quantized_rows() {
  return {
      {"x1", dtype({at::kChar, at::kInt}), kQuant},
      {"x2", dtype({at::kChar, at::kInt, at::ScalarType::QUInt4x2}), kQuant},
      {"x1", dims(2, 6), kQuant},
      {"x2", dims(2, 6), kQuant},
      {"x1", not_empty(), kQuant, {.tiling = true}},
      {"x1", contiguous_or_transposed(), kQuant},
      {"x1", size_between(-1, 1, kMostInner), kQuant, {.tiling = true}},
      {"x2_scale", present(), kQuant},
      {"x2_scale", dtype({at::kFloat, at::kBFloat16, at::kLong, at::kUInt64}), kQuant},
      {"x2_scale",
       dtype({at::kFloat, at::kBFloat16})
           .when(both(has_dtype("out", {at::kBFloat16}), is_not_mixed())),
       kQuant},
      {"x2_scale",
       dtype({at::kLong, at::kUInt64})
           .when(both(has_dtype("out", {at::kHalf}), is_missing("x1_scale"))),
       kQuant},
      {"x2_scale",
       dtype({at::kFloat})
           .when(both(both(has_dtype("out", {at::kHalf}), is_given("x1_scale")), is_not_mixed())),
       kQuant},
      {"x2_scale", dtype({at::kLong, at::kUInt64}).when(has_dtype("out", {at::kChar})), kQuant},
      {"x1_scale", dtype({at::kFloat}), kQuant},
      {"x1_scale",
       fits("have an entry for each row of x1, or columns beside one", {"x1"},
            [](const RuleArguments& own) -> Found {
              const TensorView& x = own.tensor(1);
              const int64_t entries =
                  own.tensor().dims == 2 ? size_of(own.tensor(), 0) : own.tensor().numel();
              if (own.tensor().numel() == 1 || entries == size_of(x, -2)) {
                return std::nullopt;
              }
              return "sizes " + sizes_of(own.tensor()) + " beside " + sizes_of(x);
            }),
       kQuant},
      {"x1_scale", absent().when(has_dtype("out", {at::kInt, at::kChar})), kQuant},
      {"bias", dtype({at::kInt, at::kFloat, at::kBFloat16}).when(has_dtype("out", {at::kBFloat16})),
       kQuant},
      {"bias", dtype({at::kInt, at::kFloat, at::kHalf}).when(has_dtype("out", {at::kHalf})),
       kQuant},
      {"bias", dtype({at::kInt}).when(has_dtype("out", {at::kInt, at::kChar})), kQuant},
      {"bias", dtype({at::kInt}).when(both(has_dtype("out", {at::kHalf}), is_missing("x1_scale"))),
       kQuant},
      {"out", dtype({at::kHalf, at::kBFloat16, at::kChar, at::kInt}), kQuant},
  };
}
std::vector<Row> plain_quantized_rows() {
  std::vector<Row> rows = quantized_rows();
  rows.push_back({"x2", contiguous_or_transposed(), kQuant});
  rows.push_back({"x2", size_between(-1, 1, kMostInner), kQuant, {.tiling = true}});
  for (const Row& row : grouped_scale_rows()) rows.push_back(row);
  return rows;
}
std::vector<Row> tiled_quantized_rows() {
  std::vector<Row> rows = quantized_rows();
  rows.push_back({"x2",
                  that("lie in FRACTAL_NZ", {},
                       [](const RuleArguments& own) -> Found {
                         if (own.tensor().format == kFractal) return std::nullopt;
                         return "format " + text(own.tensor().format);
                       }),
                  kQuantNz});
  rows.push_back({"x2",
                  that("have more than one row and column", {},
                       [](const RuleArguments& own) -> Found {
                         if (size_of(own.tensor(), -1) > 1 && size_of(own.tensor(), -2) > 1) {
                           return std::nullopt;
                         }
                         return "sizes " + sizes_of(own.tensor());
                       }),
                  kQuantNz,
                  {.tiling = true}});
  return rows;
}
}  // namespace

Allowed allowed_quant_matmul_v5() {
  return {{.bytes = 16 * kMiB, .copies = true}, plain_quantized_rows(), kBigChips};
}

Allowed allowed_quant_matmul_weight_nz() {
  return {{.bytes = 16 * kMiB}, tiled_quantized_rows(), kBigChips};
}

namespace {

// --- products by groups --------------------------------------------------------------------------

Condition has_integers() {
  return {"x and weight are int8", {"x", "weight"}, [](const RuleArguments& own) {
            return own.has(0) && own.has(1) && own.tensor(0).dtype == at::kChar &&
                   own.tensor(1).dtype == at::kChar;
          }};
}
// Weights of integers beside rows of floats.
Condition is_weight_only() {
  return {
      "x is float16 or bfloat16 and weight int8 or int4",
      {"x", "weight"},
      [](const RuleArguments& own) {
        if (!own.has(0) || !own.has(1)) return false;
        const ScalarType x = own.tensor(0).dtype;
        const ScalarType weight = own.tensor(1).dtype;
        return (x == at::kHalf || x == at::kBFloat16) &&
               (weight == at::kChar || weight == at::kInt || weight == at::ScalarType::QUInt4x2);
      }};
}
// 8-bit rows beside 4-bit weights, which lie in int32.
Condition has_int4() { return {"x is int8 and weight int4", {"x", "weight"}, has_halves}; }
Condition has_no_int4() {
  return {"weight is not int4 beside int8", {"x", "weight"}, [](const RuleArguments& own) {
            return !has_halves(own);
          }};
}
Condition without_row_scales() { return both(has_integers(), is_missing("row_scale")); }
Condition with_row_scales() { return both(has_integers(), is_given("row_scale")); }

std::vector<Row> rows_of_halves() {
  return {
      {"bias", present().when(has_int4()), kGroupedHalves},
      {"bias", dtype({at::kFloat}).when(has_int4()), kGroupedHalves},
      {"bias", dims(2, 2).when(has_int4()), kGroupedHalves},
      {"bias", same_size(-1, "out", -1).when(has_int4()), kGroupedHalves},
      {"scale", present().when(has_int4()), kGroupedHalves},
      {"scale", dtype({at::kLong, at::kUInt64}).when(has_int4()), kGroupedHalves},
      {"scale", dims(3, 3).when(has_int4()), kGroupedHalves},
      {"scale", same_size(-1, "out", -1).when(has_int4()), kGroupedHalves},
      {"scale",
       fits("have a number of groups that divides the columns of x", {"x"},
            [](const RuleArguments& own) -> Found {
              const int64_t groups = size_of(own.tensor(), -2);
              if (groups > 0 && size_of(own.tensor(1), -1) % groups == 0) return std::nullopt;
              return text(groups) + " groups beside sizes " + sizes_of(own.tensor(1));
            })
           .when(has_int4()),
       kGroupedHalvesTiling,
       {.tiling = true}},
      {"row_scale", present().when(has_int4()), kGroupedHalves},
      {"row_scale", dims(1, 2).when(has_int4()), kGroupedHalves},
      {"x",
       size_between(-1, 64, 18432, 64).when(has_int4()),
       kGroupedHalvesTiling,
       {.tiling = true}},
      {"weight_scale", absent().when(has_int4()), kGroupedHalves},
      {"weight_offset", absent().when(has_int4()), kGroupedHalves},
      {"group_type", one_of(std::vector<int64_t>{0}).when(has_int4()), kGroupedHalves},
      {"group_list_form", one_of(std::vector<int64_t>{1}).when(has_int4()), kGroupedHalves},
      {"activation", one_of(std::vector<int64_t>{0}).when(has_int4()), kGroupedHalves},
      {"out", dtype({at::kHalf, at::kBFloat16}).when(has_int4()), kGroupedHalves},
  };
}

std::vector<Row> grouped_rows() {
  std::vector<Row> rows = {
      {"x",
       dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kInt, at::ScalarType::QUInt4x2}),
       kGrouped},
      {"weight",
       that("have the dtype of x, or be int8 or int4", {"x"},
            [](const RuleArguments& own) -> Found {
              const ScalarType type = own.tensor().dtype;
              if (type == own.tensor(1).dtype || type == at::kChar || type == at::kInt ||
                  type == at::ScalarType::QUInt4x2) {
                return std::nullopt;
              }
              return "dtype " + name_of(type) + " beside " + name_of(own.tensor(1).dtype);
            }),
       kGrouped},
      {"x", dims(2, 6), kGrouped},
      {"weight", dims(2, 3), kGrouped},
      {"x",
       that("be a list of at most 128 tensors", {},
            [](const RuleArguments& own) -> Found {
              if (own[0].tensors.count <= 128) return std::nullopt;
              return text(own[0].tensors.count) + " tensors";
            }),
       kGrouped},
      {"x", size_between(-1, 0, kMostInner), kGrouped, {.tiling = true}},
      {"weight", size_between(-1, 1, kMostInner), kGrouped, {.tiling = true}},
      {"weight",
       that("have at most 1024 groups", {},
            [](const RuleArguments& own) -> Found {
              if (own.tensor().dims != 3 || size_of(own.tensor(), 0) <= 1024) return std::nullopt;
              return "sizes " + sizes_of(own.tensor());
            }),
       "CheckGroupListCommonTensor in aclnn_grouped_matmul.cpp"},
      {"group_list", dtype({at::kLong}), kGrouped},
      {"group_list", dims(1, 2), kGrouped},
      {"group_list",
       fits("have an entry for each group of weight", {"weight", "group_list_form"},
            [](const RuleArguments& own) -> Found {
              const TensorView& weight = own.tensor(1);
              if (weight.dims != 3 || own.integer(2) == 2 || size_of(weight, 0) == 1 ||
                  size_of(own.tensor(), 0) == size_of(weight, 0)) {
                return std::nullopt;
              }
              return "sizes " + sizes_of(own.tensor()) + " beside " + sizes_of(weight);
            }),
       "CheckGroupListCommonTensor in aclnn_grouped_matmul.cpp"},
      {"group_type", one_of(std::vector<int64_t>{-1, 0, 2}), kGrouped},
      {"group_list_form", one_of(std::vector<int64_t>{0, 1, 2}), kGrouped},
      {"bias", dtype({at::kHalf}).when(has_dtype("x", {at::kHalf})), kGrouped},
      {"bias", dtype({at::kFloat}).when(has_dtype("x", {at::kBFloat16, at::kFloat})), kGrouped},
      {"bias", dtype({at::kInt, at::kBFloat16}).when(has_integers()), kGrouped},
      {"scale",
       dtype({at::kBFloat16}).when(both(without_row_scales(), has_dtype("out", {at::kBFloat16}))),
       kGroupedCheck},
      {"scale", dtype({at::kFloat}).when(both(without_row_scales(), has_dtype("out", {at::kHalf}))),
       kGroupedCheck},
      {"scale",
       dtype({at::kLong, at::kUInt64})
           .when(both(without_row_scales(), has_dtype("out", {at::kChar}))),
       kGroupedCheck},
      {"scale",
       dtype({at::kBFloat16}).when(both(with_row_scales(), has_dtype("out", {at::kBFloat16}))),
       kGroupedCheck},
      {"scale", dtype({at::kFloat}).when(both(with_row_scales(), has_dtype("out", {at::kHalf}))),
       kGroupedCheck},
      {"row_scale", dtype({at::kFloat}), kGroupedCheck},
      {"row_scale", dims(1, 1).when(has_no_int4()), kGroupedCheck},
      {"row_scale", same_size(0, "x", 0), kGroupedCheck},
      {"weight_scale", present().when(is_weight_only()), kGroupedWeightOnly},
      {"weight_offset", present().when(is_weight_only()), kGroupedWeightOnly},
      {"weight_scale", same_dtype("x").when(is_weight_only()), kGroupedWeightOnly},
      {"weight_offset", same_dtype("x").when(is_weight_only()), kGroupedWeightOnly},
      {"weight_offset", same_sizes("weight_scale"), kGroupedWeightOnly},
      {"weight_scale", same_size(-1, "out", -1), kGroupedWeightOnly},
      {"weight_scale",
       fits("have a row for each matrix of weight, or beside int4 also a number of groups that "
            "divides the columns of x",
            {"weight", "x"},
            [](const RuleArguments& own) -> Found {
              const TensorView& scale = own.tensor();
              const TensorView& weight = own.tensor(1);
              const bool has_groups = scale.dims == weight.dims && weight.dtype != at::kChar;
              const int64_t groups = has_groups ? size_of(scale, -2) : 1;
              if (!has_groups && scale.dims != weight.dims - 1) return "sizes " + sizes_of(scale);
              if (weight.dims == 3 && size_of(scale, 0) != size_of(weight, 0)) {
                return "sizes " + sizes_of(scale) + " beside " + sizes_of(weight);
              }
              if (groups > 0 && size_of(own.tensor(2), -1) % groups == 0) return std::nullopt;
              return text(groups) + " groups beside sizes " + sizes_of(own.tensor(2));
            }),
       kGroupedWeightOnly},
      {"scale", absent().when(is_weight_only()), kGroupedWeightOnly},
      {"row_scale", absent().when(is_weight_only()), kGroupedWeightOnly},
      {"group_type", one_of(std::vector<int64_t>{-1, 0}).when(is_weight_only()),
       kGroupedWeightOnly},
      {"activation", one_of(std::vector<int64_t>{0}).when(is_weight_only()), kGroupedWeightOnly},
      {"out", same_dtype("x").when(is_weight_only()), kGroupedWeightOnly},
      {"weight_scale", absent().when(has_integers()), kGroupedCheck},
      {"weight_offset", absent().when(has_integers()), kGroupedCheck},
      {"activation", one_of(std::vector<int64_t>{0}).when(has_dtype("out", {at::kInt})), kGrouped},
  };
  for (Row& row : rows_of_halves()) rows.push_back(std::move(row));
  return rows;
}

// Whole tiles of 32 bytes by 16 rows.
Check whole_tiles() {
  return that("have whole tiles: inner sizes divisible by 16 and, last, by 32 bytes", {},
              [](const RuleArguments& own) -> Found {
                const TensorView& weight = own.tensor();
                const int64_t columns = 32 / static_cast<int64_t>(at::elementSize(weight.dtype));
                // As it was cast: a transposed view has them the other way round.
                const bool turned = weight.dims >= 2 && weight.strides[weight.dims - 2] == 1 &&
                                    weight.sizes[weight.dims - 2] != 1;
                const int64_t last = size_of(weight, turned ? -2 : -1);
                const int64_t before = size_of(weight, turned ? -1 : -2);
                if (last % columns == 0 && before % 16 == 0) return std::nullopt;
                return "sizes " + sizes_of(weight) + " of " + name_of(weight.dtype);
              });
}
std::vector<Row> tiled_grouped_rows() {
  std::vector<Row> rows = grouped_rows();
  rows.push_back({"weight", whole_tiles(), kGroupedNz});
  rows.push_back({"group_type", one_of(std::vector<int64_t>{-1, 0}), kGroupedNz});
  return rows;
}
}  // namespace

Allowed allowed_grouped_matmul_v4() {
  return {{.bytes = 16 * kMiB, .copies = true}, grouped_rows(), kBigChips};
}

Allowed allowed_grouped_matmul_weight_nz() {
  return {{.bytes = 16 * kMiB}, tiled_grouped_rows(), kBigChips};
}

}  // namespace vnpu::ops
