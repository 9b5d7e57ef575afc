// One matrix product per group of rows, such as an expert's: plain and quantized. Products fused
// with the next operation of an MoE layer are in grouped_matmul_fusions.cpp.

#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/integer_matrices.h"
#include "ops/matmul/row_groups.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

namespace {

// A list that may be absent, or hold an empty tensor, which means the same.
std::vector<Tensor> given(const OptionalTensorList& list) {
  for (const Tensor& tensor : list) {
    if (tensor.numel() > 0) return {list.begin(), list.end()};
  }
  return {};
}

Tensor activated(const Tensor& x, int64_t activation) {
  switch (activation) {
    case 0: return x;
    case 1: return at::relu(x);
    case 2: return at::gelu(x, "tanh");
    case 3: return at::gelu(x);
    case 4: return x * at::sigmoid(x * 1.702);
    case 5: return at::silu(x);
    default: refuse("actType " + std::to_string(activation) + " is not known; use 0 to 5.");
  }
}

struct GroupedMatmul {
  const TensorList& x;
  const LaidOutList& weight;
  std::vector<Tensor> bias, scale, offset, weight_scale, weight_offset, row_scale;
  OptionalTensor group_list;
  int64_t group_type, group_list_form, activation;
  const OutList& out;
};

// x [rows, k] * weight [k, n] of one group, for all quantizations of the operands.
Tensor multiply_group(const GroupedMatmul& call, const Tensor& x, const Tensor& weight,
                      int64_t group, const Tensor& row_scale, ScalarType out_type) {
  const auto parameter = [&](const std::vector<Tensor>& list, int64_t dims) {
    return list.empty() ? Tensor() : of_group(list, group, dims);
  };
  const Tensor bias = parameter(call.bias, 1);
  if (x.scalar_type() == at::kChar && weight.scalar_type() == at::kInt) {
    require(call.offset.empty(),
            "offset beside 4-bit weights, of weights that are not symmetric, is not implemented.");
    const Tensor values =
        multiply_halves(x, integer_matrix(weight, x.size(-1)), parameter(call.scale, 2), bias);
    return row_scale.defined() ? values * row_scale.to(at::kFloat).reshape({-1, 1}) : values;
  }
  if (x.scalar_type() == at::kChar) {
    Tensor sum = multiply_integers(x, integer_matrix(weight, x.size(-1)));
    const bool integer_bias = bias.defined() && bias.scalar_type() == at::kInt;
    if (integer_bias) sum = sum + bias;
    if (out_type == at::kInt) return sum;
    const Tensor scale = parameter(call.scale, 1);
    require(scale.defined(), "an int8 product needs scale, unless the result is int32.");
    Tensor values = sum.to(at::kFloat) * float_scales(scale);
    if (row_scale.defined()) values = values * row_scale.to(at::kFloat).reshape({-1, 1});
    if (bias.defined() && !integer_bias) values = values + bias.to(at::kFloat);
    return activated(values, call.activation);
  }
  Tensor dense = weight;
  if (weight.scalar_type() == at::kChar || weight.scalar_type() == at::kInt) {
    dense = integer_matrix(weight, x.size(-1)).to(at::kFloat);
    const auto over_rows = [&](const Tensor& values) {  // [n], or [blocks of rows, n]
      const Tensor wide = values.to(at::kFloat);
      return wide.dim() < 2 ? wide : wide.repeat_interleave(dense.size(0) / wide.size(0), 0);
    };
    const int64_t dims = call.weight_scale.empty() || call.weight_scale.front().dim() < 3 ? 1 : 2;
    const Tensor scale = parameter(call.weight_scale, dims);
    const Tensor offset = parameter(call.weight_offset, dims);
    require(scale.defined(), "an integer weight with x of floats needs antiquantScale.");
    if (offset.defined()) dense = dense + over_rows(offset);
    // The matrix unit multiplies numbers of one dtype: the vector unit rounds the weight to x's.
    dense = (dense * over_rows(scale)).to(x.scalar_type());
  }
  // Computes in the operands' own dtype, with sums in fp32, unless a following step needs the
  // unrounded result.
  if (x.scalar_type() == dense.scalar_type() && !bias.defined() && call.activation == 0)
    return multiply_rows(x, dense);
  Tensor values = multiply_rows(x.to(at::kFloat), dense.to(at::kFloat));
  if (bias.defined()) values = values + bias.to(at::kFloat);
  return activated(values, call.activation);
}

// Multiplies groups of one x that need nothing but a product. Returns which groups it has computed;
// the others are unchanged.
std::vector<bool> multiply_plain_groups(const GroupedMatmul& call,
                                        const std::vector<Tensor>& weights,
                                        const std::vector<Group>& groups) {
  std::vector<bool> done(groups.size(), false);
  const Tensor& x = call.x[0];
  const Tensor& out = call.out[0];
  const Tensor& first = weights[0];
  const ScalarType dtype = x.scalar_type();
  const bool is_plain = call.out.size() == 1 && weights.size() == 1 && first.dim() == 3 &&
                        x.dim() == 2 && out.dim() == 2 && first.scalar_type() == dtype &&
                        out.scalar_type() == dtype && first.size(1) == x.size(1) &&
                        x.stride(1) == 1 && out.stride(1) == 1 && call.bias.empty() &&
                        call.activation == 0;
  if (!is_plain) return done;
  const auto item = static_cast<int64_t>(x.element_size());
  const auto* const rows = static_cast<const std::byte*>(x.const_data_ptr());
  const auto* const weight = static_cast<const std::byte*>(first.const_data_ptr());
  auto* const result = static_cast<std::byte*>(out.mutable_data_ptr());
  std::vector<BlockedProduct> products;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& group = groups[i];
    if (group.index < 0 || group.index >= first.size(0)) continue;  // refused by who computes it
    const BlockedProduct product{
        .rows = rows + group.start * x.stride(0) * item,
        .row_stride = x.stride(0),
        .weight = {weight + group.index * first.stride(0) * item, dtype, first.size(1),
                   first.size(2), first.stride(1), first.stride(2)},
        .out = result + group.start * out.stride(0) * item,
        .out_stride = out.stride(0),
        .m = group.count};
    if (!is_blocked_product(product)) continue;
    products.push_back(product);
    done[i] = true;
  }
  if (!blocked_products(products)) done.assign(groups.size(), false);
  return done;
}

void grouped_matmul(const GroupedMatmul& call) {
  const std::vector<Tensor> weights = [&] {
    std::vector<Tensor> all;
    for (const LaidOut& weight : call.weight) all.push_back(dense_weight(weight));
    return all;
  }();
  require(!call.x.empty() && !weights.empty() && !call.out.empty(),
          "x, weight and out must not be empty lists.");
  const auto row_scale = [&](int64_t first, int64_t count, size_t of) {
    if (call.row_scale.empty()) return Tensor();
    return call.row_scale[std::min(of, call.row_scale.size() - 1)].narrow(0, first, count);
  };
  constexpr int64_t kSplitRows = 0;
  constexpr int64_t kSplitDepth = 2;
  if (call.group_type ==
      kSplitDepth) {  // groups of x's columns and weight's rows, one product each
    require(call.group_list.has_value(), "groupType 2 needs groupList.");
    for (const Group& group :
         row_groups(*call.group_list, static_cast<GroupListForm>(call.group_list_form),
                    call.x[0].size(-1))) {
      const Tensor product =
          at::matmul(call.x[0].narrow(-1, group.start, group.count).to(at::kFloat),
                     weights[0].narrow(-2, group.start, group.count).to(at::kFloat));
      store(call.out.size() > 1 ? call.out[static_cast<size_t>(group.index)]
                                : call.out[0][group.index],
            product);
    }
    return;
  }
  if (call.x.size() > 1 || !call.group_list) {  // every x has its own weight
    if (call.x.size() != weights.size() && weights.size() != 1) {
      refuse("x has " + std::to_string(call.x.size()) + " tensors, weight " +
             std::to_string(weights.size()) + ".");
    }
    int64_t start = 0;
    for (size_t i = 0; i < call.x.size(); ++i) {
      const int64_t rows = call.x[i].size(0);
      const bool shared_out = call.out.size() == 1 && call.x.size() > 1;
      const Tensor target = shared_out ? call.out[0].narrow(0, start, rows) : call.out[i];
      if (target.numel() > 0) {
        const auto group = static_cast<int64_t>(i);
        store(target, multiply_group(call, call.x[i], of_group(weights, group, 2), group,
                                     row_scale(call.row_scale.size() > 1 ? 0 : start, rows, i),
                                     target.scalar_type()));
      }
      start += rows;
    }
    return;
  }
  if (call.group_type != kSplitRows) {
    refuse("groupType " + std::to_string(call.group_type) +
           " does not fit one x with groupList; use 0.");
  }
  const Tensor& x = call.x[0];
  const std::vector<Group> groups =
      row_groups(*call.group_list, static_cast<GroupListForm>(call.group_list_form), x.size(0));
  if (call.out.size() == 1) {  // rows after the last group belong to no product
    const int64_t end = groups.empty() ? 0 : groups.back().start + groups.back().count;
    call.out[0].narrow(0, end, call.out[0].size(0) - end).zero_();
  }
  const std::vector<bool> is_done = multiply_plain_groups(call, weights, groups);
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& group = groups[i];
    if (group.count == 0 || is_done[i]) continue;
    const Tensor target = call.out.size() > 1 ? call.out[static_cast<size_t>(group.index)]
                                              : call.out[0].narrow(0, group.start, group.count);
    store(target, multiply_group(call, x.narrow(0, group.start, group.count),
                                 of_group(weights, group.index, 2), group.index,
                                 row_scale(group.start, group.count, 0), target.scalar_type()));
  }
}

}  // namespace

#define VNPU_GROUPED_MATMUL_INPUTS                                                                 \
  const TensorList &x, const LaidOutList &weight, const OptionalTensorList &bias,                  \
      const OptionalTensorList &scale, const OptionalTensorList &offset,                           \
      const OptionalTensorList &weight_scale, const OptionalTensorList &weight_offset,             \
      const OptionalTensorList &row_scale, const OptionalTensor &group_list,                       \
      const OptionalTensorList &, const OptionalTensorList &, const OptionalTensorList &, int64_t, \
      int64_t group_type, int64_t group_list_form, int64_t activation
#define VNPU_GROUPED_MATMUL_CALL                                                                   \
  grouped_matmul({x, weight, given(bias), given(scale), given(offset), given(weight_scale),        \
                  given(weight_offset), given(row_scale), group_list, group_type, group_list_form, \
                  activation, out})

constexpr char kGrouped[] = "op-plugin torch_npu-npu_grouped_matmul.md, constraints";
constexpr char kGroupedCheck[] = "CheckQuantParamsDtype in aclnn_grouped_matmul.cpp";
constexpr char kGroupedWeightOnly[] = "CheckGroupedMatmulAntiQuant in aclnn_grouped_matmul.cpp";
constexpr char kGroupedHalves[] =
    "ops-transformer gmm/grouped_matmul/docs/aclnnGroupedMatmulV5.md, A8W4";
// The page lists groups of 256 only; the host code accepts any number that divides the depth, and
// one scale.
constexpr char kGroupedHalvesTiling[] = "A8W4Tiling in grouped_matmul_tiling.cpp";
static Condition has_integers() {
  return {"x and weight are int8", {"x", "weight"}, [](const RuleArguments& own) {
            return own.has(0) && own.has(1) && own.tensor(0).dtype == at::kChar &&
                   own.tensor(1).dtype == at::kChar;
          }};
}
// Integer weights and float rows.
static Condition is_weight_only() {
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
// 8-bit rows and 4-bit weights, packed in int32.
static Condition has_int4() { return {"x is int8 and weight int4", {"x", "weight"}, has_halves}; }
static Condition has_no_int4() {
  return {"weight is not int4 beside int8", {"x", "weight"}, [](const RuleArguments& own) {
            return !has_halves(own);
          }};
}
static Condition without_row_scales() { return both(has_integers(), is_missing("row_scale")); }
static Condition with_row_scales() { return both(has_integers(), is_given("row_scale")); }
static std::vector<Rule> rules_of_halves() {
  return {{"bias",
           when(has_int4(), {present(), dtype({at::kFloat}), dims(2, 2), same_size(-1, "out", -1)}),
           kGroupedHalves},
          {"scale",
           when(has_int4(),
                {present(), dtype({at::kLong, at::kUInt64}), dims(3, 3), same_size(-1, "out", -1)}),
           kGroupedHalves},
          {"scale",
           fits("have a number of groups that divides the columns of x", {"x"},
                [](const RuleArguments& own) {
                  const int64_t groups = size_of(own.tensor(), -2);
                  return groups > 0 && size_of(own.tensor(1), -1) % groups == 0;
                })
               .when(has_int4()),
           kGroupedHalvesTiling,
           {.tiling = true}},
          {"row_scale", when(has_int4(), {present(), dims(1, 2)}), kGroupedHalves},
          {"x",
           size_between(-1, 64, 18432, 64).when(has_int4()),
           kGroupedHalvesTiling,
           {.tiling = true}},
          {"weight_scale, weight_offset", absent().when(has_int4()), kGroupedHalves},
          {"group_type, activation", one_of(0).when(has_int4()), kGroupedHalves},
          {"group_list_form", one_of(1).when(has_int4()), kGroupedHalves},
          {"out", dtype({at::kHalf, at::kBFloat16}).when(has_int4()), kGroupedHalves}};
}
static std::vector<Rule> grouped_rules() {
  return joined(
      {{"x",
        {dtype(
             {at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kInt, at::ScalarType::QUInt4x2}),
         dims(2, 6),
         that("be a list of at most 128 tensors", {},
              [](const RuleArguments& own) { return own[0].tensors.count <= 128; })}},
       {"weight",
        {that("have the dtype of x, or be int8 or int4", {"x"},
              [](const RuleArguments& own) {
                const ScalarType type = own.tensor().dtype;
                return type == own.tensor(1).dtype || type == at::kChar || type == at::kInt ||
                       type == at::ScalarType::QUInt4x2;
              }),
         dims(2, 3)}},
       {"x", size_between(-1, 0, kMostInner), {.tiling = true}},
       {"weight", size_between(-1, 1, kMostInner), {.tiling = true}},
       {"weight",
        that("have at most 1024 groups", {},
             [](const RuleArguments& own) {
               return own.tensor().dims != 3 || size_of(own.tensor(), 0) <= 1024;
             }),
        "CheckGroupListCommonTensor in aclnn_grouped_matmul.cpp"},
       {"group_list", {dtype({at::kLong}), dims(1, 2)}},
       {"group_list",
        fits("have an entry for each group of weight", {"weight", "group_list_form"},
             [](const RuleArguments& own) {
               const TensorView& weight = own.tensor(1);
               return weight.dims != 3 || own.integer(2) == 2 || size_of(weight, 0) == 1 ||
                      size_of(own.tensor(), 0) == size_of(weight, 0);
             }),
        "CheckGroupListCommonTensor in aclnn_grouped_matmul.cpp"},
       {"group_type", one_of(-1, 0, 2)},
       {"group_list_form", one_of(0, 1, 2)},
       {"bias", dtype({at::kHalf}).when(has_dtype("x", {at::kHalf}))},
       {"bias", dtype({at::kFloat}).when(has_dtype("x", {at::kBFloat16, at::kFloat}))},
       {"bias", dtype({at::kInt, at::kBFloat16}).when(has_integers())},
       {"scale",
        dtype({at::kBFloat16}).when(both(without_row_scales(), has_dtype("out", {at::kBFloat16}))),
        kGroupedCheck},
       {"scale",
        dtype({at::kFloat}).when(both(without_row_scales(), has_dtype("out", {at::kHalf}))),
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
       {"row_scale", {dtype({at::kFloat}), same_size(0, "x", 0)}, kGroupedCheck},
       {"row_scale", dims(1, 1).when(has_no_int4()), kGroupedCheck},
       {"weight_scale, weight_offset", when(is_weight_only(), {present(), same_dtype("x")}),
        kGroupedWeightOnly},
       {"weight_offset", same_sizes("weight_scale"), kGroupedWeightOnly},
       {"weight_scale",
        {same_size(-1, "out", -1),
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
              })},
        kGroupedWeightOnly},
       {"scale, row_scale", absent().when(is_weight_only()), kGroupedWeightOnly},
       {"group_type", one_of(-1, 0).when(is_weight_only()), kGroupedWeightOnly},
       {"activation", one_of(0).when(is_weight_only()), kGroupedWeightOnly},
       {"out", same_dtype("x").when(is_weight_only()), kGroupedWeightOnly},
       {"weight_scale, weight_offset", absent().when(has_integers()), kGroupedCheck},
       {"activation", one_of(0).when(has_dtype("out", {at::kInt}))}},
      rules_of_halves());
}
static Rules rules_of_grouped_matmul_v4() {
  return {kGrouped, grouped_rules(), {.bytes = 16 * kMiB, .copies = true}, kBigChips};
}
static void cost_of_grouped_matmul_v4(const Call& call, Work& work) {
  multiply_groups(call, work, "out", 1);
}
VNPU_OPERATOR(GroupedMatmulV4,
              (VNPU_GROUPED_MATMUL_INPUTS, const OutList& out, const OptionalOutList&,
               const OptionalOutList&),
              {.tier = kT2,
               .cost = cost_of_grouped_matmul_v4,
               .rules = rules_of_grouped_matmul_v4()}) {
  VNPU_GROUPED_MATMUL_CALL;
}
VNPU_OPERATOR(GroupedMatmulV5,
              (VNPU_GROUPED_MATMUL_INPUTS, const OptionalIntArray&, const OutList& out,
               const OptionalOutList&, const OptionalOutList&),
              {.tier = kT2,
               .cost = cost_of_grouped_matmul_v4,
               .rules = rules_of_grouped_matmul_v4()}) {
  VNPU_GROUPED_MATMUL_CALL;
}

constexpr char kGroupedNz[] = "aclnnGroupedMatmulWeightNz in aclnn_grouped_matmul.cpp";
// Whole tiles of 32 bytes by 16 rows.
static Check whole_tiles() {
  return that("have whole tiles: inner sizes divisible by 16 and, last, by 32 bytes", {},
              [](const RuleArguments& own) {
                const TensorView& weight = own.tensor();
                const int64_t columns = 32 / static_cast<int64_t>(at::elementSize(weight.dtype));
                // As cast: in a transposed view they are swapped.
                const bool turned = weight.dims >= 2 && weight.strides[weight.dims - 2] == 1 &&
                                    weight.sizes[weight.dims - 2] != 1;
                const int64_t last = size_of(weight, turned ? -2 : -1);
                const int64_t before = size_of(weight, turned ? -1 : -2);
                return last % columns == 0 && before % 16 == 0;
              });
}
VNPU_OPERATOR(GroupedMatmulWeightNz,
              (VNPU_GROUPED_MATMUL_INPUTS, const OptionalIntArray&, int64_t, const OutList& out,
               const OptionalOutList&, const OptionalOutList&),
              {.tier = kT2,
               .cost = cost_of_grouped_matmul_v4,
               .rules = {kGrouped,
                         joined(grouped_rules(), {{"weight", whole_tiles(), kGroupedNz},
                                                  {"group_type", one_of(-1, 0), kGroupedNz}}),
                         {.bytes = 16 * kMiB},
                         kBigChips}}) {
  VNPU_GROUPED_MATMUL_CALL;
}

}  // namespace vnpu::ops
