// Matrix products with quantized operands: both as integers, or only the weight.

#include <limits>

#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/integer_matrices.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

struct QuantMatmul {
  const Tensor& x1;
  const Tensor& x2;
  OptionalTensor row_scale;  // of x1's rows
  OptionalTensor scale;      // of x2's columns, or one
  OptionalTensor offset;     // of an int8 result
  OptionalTensor bias;
  bool transpose1, transpose2;
  OptionalTensor y_offset;  // beside 4-bit weights: see `multiply_halves`
};

Tensor turned(const Tensor& matrix, bool transpose) {
  return transpose ? matrix.transpose(-1, -2) : matrix;
}

// Both operands with scales in blocks: x1's of 128 columns of a row, x2's of 128 x 128. As floats.
Tensor product_of_blocks(const QuantMatmul& call) {
  constexpr int64_t kBlock = 128;
  const Tensor x1 = turned(call.x1, call.transpose1);
  const Tensor x2 = turned(call.x2, call.transpose2);
  const Tensor row_scale = turned(*call.row_scale, call.transpose1).to(at::kFloat);
  const Tensor scale = turned(*call.scale, call.transpose2).to(at::kFloat);
  Tensor sum = at::zeros({x1.size(-2), x2.size(-1)}, at::kFloat);
  for (int64_t first = 0, block = 0; first < x1.size(-1); first += kBlock, ++block) {
    const int64_t depth = std::min(kBlock, x1.size(-1) - first);
    const Tensor part =
        multiply_integers(x1.narrow(-1, first, depth), x2.narrow(-2, first, depth)).to(at::kFloat);
    const Tensor columns = scale[block].repeat_interleave(kBlock, 0).narrow(0, 0, x2.size(-1));
    sum.add_(part * row_scale.narrow(-1, block, 1) * columns);
  }
  return sum;
}

void quant_matmul(const QuantMatmul& call, const Out& out) {
  if (out.tensor.numel() == 0) return;
  if (call.row_scale && call.row_scale->dim() == 2 && call.row_scale->size(-1) > 1) {
    const Tensor sum = product_of_blocks(call);
    store(out, call.bias ? sum + call.bias->to(at::kFloat) : sum);
    return;
  }
  if (call.x1.scalar_type() == at::kChar && call.x2.scalar_type() == at::kInt) {
    require(call.row_scale && call.scale && call.y_offset,
            "8-bit rows beside 4-bit weights need x1Scale, x2Scale and yOffset.");
    const Tensor rows = turned(call.x1, call.transpose1);
    const Tensor weight = integer_matrix(turned(call.x2, call.transpose2), rows.size(-1));
    store(out, multiply_halves(rows, weight, *call.scale, *call.y_offset) *
                   call.row_scale->to(at::kFloat).reshape({-1, 1}));
    return;
  }
  const Tensor x1_turned = turned(call.x1, call.transpose1);
  const Tensor x1 = x1_turned.scalar_type() == at::kInt ? unpack_int4(x1_turned) : x1_turned;
  require(x1.scalar_type() == at::kChar, "x1 must be int8, or int32 that holds 4-bit integers.");
  const Tensor x2 = integer_matrix(turned(call.x2, call.transpose2), x1.size(-1));
  Tensor sum = multiply_integers(x1, x2);
  const bool integer_bias = call.bias && call.bias->scalar_type() == at::kInt;
  if (integer_bias) sum = sum + *call.bias;
  if (out.tensor.scalar_type() == at::kInt) {
    store(out, sum);
    return;
  }
  require(call.scale.has_value(), "a result that is not int32 needs the scale of x2.");
  Tensor values = sum.to(at::kFloat) * float_scales(*call.scale);
  if (call.row_scale) values = values * call.row_scale->to(at::kFloat).reshape({-1, 1});
  if (call.bias && !integer_bias) values = values + call.bias->to(at::kFloat);
  if (out.tensor.scalar_type() != at::kChar) {
    store(out, values);
    return;
  }
  if (call.offset) values = values + call.offset->to(at::kFloat);
  store(out, to_int8(values));
}

struct WeightQuantMatmul {
  const Tensor& x;
  const Tensor& weight;  // [k, n] int8, or int32 that holds 4-bit integers
  const Tensor& scale;   // one, [n], or [groups, n]
  OptionalTensor offset, out_scale, bias;
};

// Spreads parameters of groups of rows over the rows of a weight [k, n].
Tensor over_rows(const Tensor& parameter, int64_t rows, int64_t group_size) {
  const Tensor wide = parameter.to(at::kFloat);
  if (wide.dim() < 2 || wide.size(0) == 1) return wide;
  const int64_t step = group_size > 0 ? group_size : (rows + wide.size(0) - 1) / wide.size(0);
  return wide.repeat_interleave(step, 0).narrow(0, 0, rows);
}

void weight_quant_matmul(const WeightQuantMatmul& call, int64_t group_size, const Out& out) {
  if (out.tensor.numel() == 0) return;
  const int64_t rows = call.x.size(-1);
  const Tensor integers = integer_matrix(call.weight, rows);
  if (integers.size(-2) != rows) {
    refuse("x has " + std::to_string(rows) + " columns, weight " +
           std::to_string(integers.size(-2)) + " rows.");
  }
  Tensor weight = integers.to(at::kFloat);
  if (call.offset) weight = weight + over_rows(*call.offset, rows, group_size);
  weight = weight * over_rows(float_scales(call.scale), rows, group_size);
  // The matrix unit multiplies numbers of one dtype: the vector unit rounds the weight to x's.
  weight = weight.to(call.x.scalar_type()).to(at::kFloat);
  Tensor values = multiply_rows(call.x.to(at::kFloat), weight);
  if (call.bias) values = values + call.bias->to(at::kFloat);
  if (call.out_scale) values = values * float_scales(*call.out_scale);
  store(out, out.tensor.scalar_type() == at::kChar ? to_int8(values) : values);
}

}  // namespace

constexpr char kQuant[] = "op-plugin torch_npu-npu_quant_matmul.md, constraints";
constexpr char kQuantGroups[] =
    "ops-nn matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md, K-G";
constexpr char kQuantBlocks[] =
    "ops-nn matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md, G-B";
static Condition is_mixed() { return {"x1 is int8 and x2 int4", {"x1", "x2"}, has_halves}; }
static Condition is_not_mixed() {
  return {"x2 is not int4 beside int8", {"x1", "x2"}, [](const RuleArguments& own) {
            return !has_halves(own);
          }};
}
// Scales of x1 for blocks of its rows.
static Condition has_blocks() {
  return {"x1_scale has columns", {"x1_scale"}, [](const RuleArguments& own) {
            return own.has() && own.tensor().dims == 2 && size_of(own.tensor(), 1) > 1;
          }};
}
static Check is(bool value) {
  return that(value ? "be true" : "be false", {},
              [value](const RuleArguments& own) { return (own.integer() != 0) == value; });
}
// An entry for each block of a matrix, those at its edges among them.
static Check blocks_of(const char* matrix, int64_t rows, int64_t columns) {
  return fits("have an entry for each " + (rows == 1 ? "" : text(rows) + " rows by ") +
                  text(columns) + " columns of " + matrix,
              {matrix}, [rows, columns](const RuleArguments& own) {
                const TensorView& x = own.tensor(1);
                return size_of(own.tensor(), -2) == (size_of(x, -2) + rows - 1) / rows &&
                       size_of(own.tensor(), -1) == (size_of(x, -1) + columns - 1) / columns;
              });
}
// Rules for products with scales along the depth: rows and weights of different widths, or blocks
// of both.
static std::vector<Rule> grouped_scale_rules() {
  constexpr int64_t kBlocks = (INT64_C(1) << 32) + (128 << 16) + 128;
  return {{"x1_scale", present().when(is_mixed()), kQuantGroups},
          {"x2_scale", dtype({at::kLong, at::kUInt64}).when(is_mixed()), kQuantGroups},
          {"y_offset", when(is_mixed(), {present(), dtype({at::kFloat}), same_size(-1, "out", -1)}),
           kQuantGroups},
          {"bias", absent().when(is_mixed()), kQuantGroups},
          {"transpose1", is(false).when(is_mixed()), kQuantGroups},
          {"x1", size_between(-1, 256, 29575, 256).when(is_mixed()), kQuantGroups},
          {"x1_scale", blocks_of("x1", 1, 128).when(has_blocks()), kQuantBlocks},
          {"x2_scale", when(has_blocks(), {dtype({at::kFloat}), blocks_of("x2", 128, 128)}),
           kQuantBlocks},
          {"x1", when(has_blocks(), {dtype({at::kChar}), size_between(-1, 512, kMostInner, 512)}),
           kQuantBlocks},
          {"x2", size_between(-2, 256, std::numeric_limits<int64_t>::max(), 256).when(has_blocks()),
           kQuantBlocks},
          {"transpose1", is(false).when(has_blocks()), kQuantBlocks},
          {"transpose2", is(true).when(has_blocks()), kQuantBlocks},
          {"group_size", one_of(kBlocks).when(has_blocks()), kQuantBlocks},
          {"bias", dtype({at::kFloat}).when(has_blocks()), kQuantBlocks},
          {"out", dtype({at::kBFloat16}).when(has_blocks()), kQuantBlocks}};
}
static std::vector<Rule> quantized_rules(const std::vector<Rule>& more) {
  return joined(
      {{"x1", {dtype({at::kChar, at::kInt}), dims(2, 6), contiguous_or_transposed()}},
       {"x2", {dtype({at::kChar, at::kInt, at::ScalarType::QUInt4x2}), dims(2, 6)}},
       {"x1", {not_empty(), size_between(-1, 1, kMostInner)}, {.tiling = true}},
       {"x2_scale", {present(), dtype({at::kFloat, at::kBFloat16, at::kLong, at::kUInt64})}},
       {"x2_scale", dtype({at::kFloat, at::kBFloat16})
                        .when(both(has_dtype("out", {at::kBFloat16}), is_not_mixed()))},
       {"x2_scale", dtype({at::kLong, at::kUInt64})
                        .when(both(has_dtype("out", {at::kHalf}), is_missing("x1_scale")))},
       {"x2_scale",
        dtype({at::kFloat})
            .when(both(both(has_dtype("out", {at::kHalf}), is_given("x1_scale")), is_not_mixed()))},
       {"x2_scale", dtype({at::kLong, at::kUInt64}).when(has_dtype("out", {at::kChar}))},
       {"x1_scale",
        {dtype({at::kFloat}),
         fits("have an entry for each row of x1, or columns beside one", {"x1"},
              [](const RuleArguments& own) {
                const TensorView& x = own.tensor(1);
                const int64_t entries =
                    own.tensor().dims == 2 ? size_of(own.tensor(), 0) : own.tensor().numel();
                return own.tensor().numel() == 1 || entries == size_of(x, -2);
              })}},
       {"x1_scale", absent().when(has_dtype("out", {at::kInt, at::kChar}))},
       {"bias",
        dtype({at::kInt, at::kFloat, at::kBFloat16}).when(has_dtype("out", {at::kBFloat16}))},
       {"bias", dtype({at::kInt, at::kFloat, at::kHalf}).when(has_dtype("out", {at::kHalf}))},
       {"bias", dtype({at::kInt}).when(has_dtype("out", {at::kInt, at::kChar}))},
       {"bias",
        dtype({at::kInt}).when(both(has_dtype("out", {at::kHalf}), is_missing("x1_scale")))},
       {"out", dtype({at::kHalf, at::kBFloat16, at::kChar, at::kInt})}},
      more);
}
static Condition has_tiles() {
  return {"weight lies in FRACTAL_NZ", {"weight"}, [](const RuleArguments& own) {
            return own.has() && own.tensor().format == kFractal;
          }};
}
static Condition has_rows() {
  return {"weight lies in ND", {"weight"}, [](const RuleArguments& own) {
            return own.has() && own.tensor().format != kFractal;
          }};
}
static Condition has_packed_scales() { return has_dtype("scale", {at::kLong, at::kUInt64}); }
static Check floats_of_x(std::string others) {
  return that("have the dtype of x, or be " + std::move(others), {"x"},
              [](const RuleArguments& own) {
                const ScalarType type = own.tensor().dtype;
                const bool is_half = type == at::kHalf || type == at::kBFloat16;
                return !is_half || type == own.tensor(1).dtype;
              });
}
// One for all, one for each column, or a row of them for each group of the weight's rows.
static Check sizes_of_scales() {
  return fits("have one entry, or as many columns as out and a row for each group of group_size",
              {"x", "out", "group_size"}, [](const RuleArguments& own) {
                const TensorView& scale = own.tensor();
                const int64_t columns = size_of(own.tensor(1), -1);
                const int64_t group = own.integer(3);
                const int64_t groups = group > 0 ? (columns + group - 1) / group : 1;
                const int64_t rows = scale.dims == 1 ? 1 : size_of(scale, 0);
                const bool is_one = scale.numel() == 1 && groups == 1;
                return is_one ||
                       (rows == groups && size_of(scale, -1) == size_of(own.tensor(2), -1));
              });
}
static Check group_size() {
  return that("be 0, or a multiple of 32 from 32 to k - 1", {"x"}, [](const RuleArguments& own) {
    const int64_t size = own.integer();
    const int64_t columns = size_of(own.tensor(1), -1);
    return size == 0 || (size >= 32 && size < columns && size % 32 == 0);
  });
}
// Rows, columns and depth, from the result and the left operand.
static void multiply_into(Work& work, const TensorView& left, bool is_transposed,
                          const TensorView& out) {
  work.kind = Work::Class::kMatmul;
  MatrixProduct product;
  product.n = size_of(out, -1);
  product.m = product.n > 0 ? out.numel() / product.n : 0;
  product.k = size_of(left, is_transposed ? -2 : -1);
  product.arithmetic = arithmetic_of(left);
  work.products.push_back(product);
}
static void cost_of_quant_matmul_v5(const Call& call, Work& work) {
  multiply_into(work, call.tensor("x1"), call.integer("transpose1", 0) != 0, call.tensor("out"));
  work.vector_operations = 2 * call.tensor("out").numel();
  work.wide = true;
}
VNPU_OPERATOR(
    QuantMatmulV5,
    (const Tensor& x1, const Tensor& x2, const OptionalTensor& x1_scale,
     const OptionalTensor& x2_scale, const OptionalTensor&, const OptionalTensor&,
     const OptionalTensor& x2_offset, const OptionalTensor& y_offset, const OptionalTensor& bias,
     bool transpose1, bool transpose2, [[maybe_unused]] int64_t group_size, Out out),
    {.tier = kT2,
     .cost = cost_of_quant_matmul_v5,
     .rules = {kQuant,
               quantized_rules(joined({{"x2", contiguous_or_transposed()},
                                       {"x2", size_between(-1, 1, kMostInner), {.tiling = true}}},
                                      grouped_scale_rules())),
               {.bytes = 16 * kMiB, .copies = true},
               kBigChips}}) {
  quant_matmul({x1, x2, x1_scale, x2_scale, x2_offset, bias, transpose1, transpose2, y_offset},
               out);
}

constexpr char kQuantNz[] =
    "ops-nn matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulWeightNz.md, constraints";
VNPU_OPERATOR(QuantMatmulWeightNz,
              (const Tensor& x1, const LaidOut& x2, const OptionalTensor& x1_scale,
               const OptionalTensor& x2_scale, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor& x2_offset, const OptionalTensor&, const OptionalTensor& bias,
               bool transpose1, bool transpose2, int64_t, Out out),
              {.tier = kT2,
               .cost = cost_of_quant_matmul_v5,
               .rules = {kQuant,
                         quantized_rules({{"x2",
                                           that("lie in FRACTAL_NZ", {},
                                                [](const RuleArguments& own) {
                                                  return own.tensor().format == kFractal;
                                                }),
                                           kQuantNz},
                                          {"x2",
                                           that("have more than one row and column", {},
                                                [](const RuleArguments& own) {
                                                  return size_of(own.tensor(), -1) > 1 &&
                                                         size_of(own.tensor(), -2) > 1;
                                                }),
                                           kQuantNz,
                                           {.tiling = true}}}),
                         {.bytes = 16 * kMiB},
                         kBigChips}}) {
  quant_matmul({x1, x2.matrix(), x1_scale, x2_scale, x2_offset, bias, transpose1, transpose2, {}},
               out);
}

static Rules rules_of_weight_quant_batch_matmul_v2() {
  return {
      "ops-nn matmul/weight_quant_batch_matmul_v2/docs/aclnnWeightQuantBatchMatmulV2.md, "
      "constraints "
      "of A2 and A3",
      {{"x",
        {dtype({at::kHalf, at::kBFloat16}), dims(2, 2), not_empty(), contiguous_or_transposed(),
         size_between(-1, 1, kMostInner)}},
       {"weight", {dtype({at::kChar, at::kInt, at::ScalarType::QUInt4x2}), dims(2, 2)}},
       {"weight", contiguous_or_transposed().when(has_rows())},
       {"weight", same_size(0, "x", 1).when(has_dtype("weight", {at::kChar}))},
       {"scale",
        {dtype({at::kHalf, at::kBFloat16, at::kLong, at::kUInt64}), dims(1, 2),
         floats_of_x("int64 or uint64"), sizes_of_scales()}},
       {"x", dtype({at::kHalf}).when(has_packed_scales())},
       {"weight", dtype({at::kChar}).when(has_packed_scales())},
       {"offset",
        {dtype({at::kHalf, at::kBFloat16, at::kInt}), floats_of_x("int32"), same_sizes("scale")}},
       {"scale", dtype({at::kLong, at::kUInt64}).when(has_dtype("offset", {at::kInt}))},
       {"out_scale", dtype({at::kUInt64})},
       {"out_scale", present().when(has_dtype("out", {at::kChar}))},
       {"bias", {dims(1, 2), same_size(-1, "out", -1)}},
       {"bias", dtype({at::kHalf}).when(has_dtype("x", {at::kHalf}))},
       {"bias", dtype({at::kFloat}).when(has_dtype("x", {at::kBFloat16}))},
       {"group_size", group_size()},
       {"out", {dims(2, 2), size_between(-1, 1, kMostInner)}},
       {"out", dtype({at::kChar}).when(is_given("out_scale"))},
       {"out", same_dtype("x").when(is_missing("out_scale"))},
       {"out", dtype({at::kHalf, at::kBFloat16}).when(has_tiles())}},
      {.bytes = 16 * kMiB, .copies = true},
      kA2 | kA3};
}
static void cost_of_weight_quant_batch_matmul_v2(const Call& call, Work& work) {
  multiply_into(work, call.tensor("x"), false, call.tensor("out"));
  work.vector_operations = 2 * call.tensor("weight").numel();
}
VNPU_OPERATOR(WeightQuantBatchMatmulV2,
              (const Tensor& x, const LaidOut& weight, const Tensor& scale,
               const OptionalTensor& offset, const OptionalTensor& out_scale, const OptionalTensor&,
               const OptionalTensor& bias, int32_t group_size, Out out),
              {.tier = kT2,
               .cost = cost_of_weight_quant_batch_matmul_v2,
               .rules = rules_of_weight_quant_batch_matmul_v2()}) {
  weight_quant_matmul({x, weight.matrix(), scale, offset, out_scale, bias}, group_size, out);
}
VNPU_OPERATOR(WeightQuantBatchMatmulV3,
              (const Tensor& x, const LaidOut& weight, const Tensor& scale,
               const OptionalTensor& offset, const OptionalTensor& out_scale, const OptionalTensor&,
               const OptionalTensor& bias, int32_t group_size, int32_t, Out out),
              {.tier = kT2,
               .cost = cost_of_weight_quant_batch_matmul_v2,
               .rules = rules_of_weight_quant_batch_matmul_v2()}) {
  weight_quant_matmul({x, weight.matrix(), scale, offset, out_scale, bias}, group_size, out);
}
VNPU_OPERATOR(WeightQuantBatchMatmulNz,
              (const Tensor& x, const LaidOut& weight, const Tensor& scale,
               const OptionalTensor& offset, const OptionalTensor& out_scale, const OptionalTensor&,
               const OptionalTensor& bias, int32_t group_size, Out out),
              {.tier = kT2, .cost = cost_of_weight_quant_batch_matmul_v2}) {
  weight_quant_matmul({x, weight.matrix(), scale, offset, out_scale, bias}, group_size, out);
}

}  // namespace vnpu::ops
