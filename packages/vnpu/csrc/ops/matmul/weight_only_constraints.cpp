// What products with weights of integers beside rows of floats can be called with.
// Source: docs of ops-nn (matmul/weight_quant_batch_matmul_v2).

#include "ops/matmul/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kPage[] =
    "ops-nn matmul/weight_quant_batch_matmul_v2/docs/aclnnWeightQuantBatchMatmulV2.md, constraints "
    "of A2 and A3";

constexpr int32_t kFractal = 29;  // ACL_FORMAT_FRACTAL_NZ
constexpr int64_t kMost = 65535;

Condition has_tiles() {
  return {"weight lies in FRACTAL_NZ", {"weight"}, [](const RuleArguments& own) {
            return own.has() && own.tensor().format == kFractal;
          }};
}
Condition has_rows() {
  return {"weight lies in ND", {"weight"}, [](const RuleArguments& own) {
            return own.has() && own.tensor().format != kFractal;
          }};
}
Condition has_packed_scales() { return has_dtype("scale", {at::kLong, at::kUInt64}); }

Check floats_of_x(std::string others) {
  return that("have the dtype of x, or be " + std::move(others), {"x"},
              [](const RuleArguments& own) -> Found {
                const ScalarType type = own.tensor().dtype;
                const bool is_half = type == at::kHalf || type == at::kBFloat16;
                if (!is_half || type == own.tensor(1).dtype) return std::nullopt;
                return "dtype " + name_of(type) + " beside " + name_of(own.tensor(1).dtype);
              });
}

// One for all, one for each column, or a row of them for each group of the weight's rows.
Check sizes_of_scales() {
  return fits("have one entry, or as many columns as out and a row for each group of group_size",
              {"x", "out", "group_size"}, [](const RuleArguments& own) -> Found {
                const TensorView& scale = own.tensor();
                const int64_t columns = size_of(own.tensor(1), -1);
                const int64_t group = own.integer(3);
                const int64_t groups = group > 0 ? (columns + group - 1) / group : 1;
                const int64_t rows = scale.dims == 1 ? 1 : size_of(scale, 0);
                const bool is_one = scale.numel() == 1 && groups == 1;
                if (is_one || (rows == groups && size_of(scale, -1) == size_of(own.tensor(2), -1)))
                  return std::nullopt;
                return "sizes " + sizes_of(scale) + " beside " + std::to_string(groups) +
                       " groups and out " + sizes_of(own.tensor(2));
              });
}

Check group_size() {
  return that("be 0, or a multiple of 32 from 32 to k - 1", {"x"},
              [](const RuleArguments& own) -> Found {
                const int64_t size = own.integer();
                const int64_t columns = size_of(own.tensor(1), -1);
                if (size == 0 || (size >= 32 && size < columns && size % 32 == 0)) {
                  return std::nullopt;
                }
                return "value " + std::to_string(size) + " beside k " + std::to_string(columns);
              });
}

std::vector<Row> rows() {
  return {
      {"x", dtype({at::kHalf, at::kBFloat16}), kPage},
      {"x", dims(2, 2), kPage},
      {"x", not_empty(), kPage},
      {"x", contiguous_or_transposed(), kPage},
      {"x", size_between(-1, 1, kMost), kPage},
      {"weight", dtype({at::kChar, at::kInt, at::ScalarType::QUInt4x2}), kPage},
      {"weight", dims(2, 2), kPage},
      {"weight", contiguous_or_transposed().when(has_rows()), kPage},
      {"weight", same_size(0, "x", 1).when(has_dtype("weight", {at::kChar})), kPage},
      {"scale", dtype({at::kHalf, at::kBFloat16, at::kLong, at::kUInt64}), kPage},
      {"scale", dims(1, 2), kPage},
      {"scale", floats_of_x("int64 or uint64"), kPage},
      {"scale", sizes_of_scales(), kPage},
      {"x", dtype({at::kHalf}).when(has_packed_scales()), kPage},
      {"weight", dtype({at::kChar}).when(has_packed_scales()), kPage},
      {"offset", dtype({at::kHalf, at::kBFloat16, at::kInt}), kPage},
      {"offset", floats_of_x("int32"), kPage},
      {"offset", same_sizes("scale"), kPage},
      {"scale", dtype({at::kLong, at::kUInt64}).when(has_dtype("offset", {at::kInt})), kPage},
      {"out_scale", dtype({at::kUInt64}), kPage},
      {"out_scale", present().when(has_dtype("out", {at::kChar})), kPage},
      {"bias", dims(1, 2), kPage},
      {"bias", dtype({at::kHalf}).when(has_dtype("x", {at::kHalf})), kPage},
      {"bias", dtype({at::kFloat}).when(has_dtype("x", {at::kBFloat16})), kPage},
      {"bias", same_size(-1, "out", -1), kPage},
      {"group_size", group_size(), kPage},
      {"out", dims(2, 2), kPage},
      {"out", size_between(-1, 1, kMost), kPage},
      {"out", dtype({at::kChar}).when(is_given("out_scale")), kPage},
      {"out", same_dtype("x").when(is_missing("out_scale")), kPage},
      {"out", dtype({at::kHalf, at::kBFloat16}).when(has_tiles()), kPage},
  };
}
}  // namespace

Allowed allowed_weight_quant_batch_matmul_v2() {
  return {{.bytes = 16 * kMiB, .copies = true}, rows(), kA2 | kA3};
}

}  // namespace vnpu::ops
