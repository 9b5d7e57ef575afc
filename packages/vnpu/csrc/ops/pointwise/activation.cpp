// Gated activations of model layers: float32 inside, rounded once.

#include <ATen/Parallel.h>

#include "ops/float_rows.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kGrainElements = 65536;  // work worth a second thread

// The halves of x along `dim`: the gate and what it scales.
std::pair<Tensor, Tensor> halves(const Tensor& x, int64_t dim) {
  require(x.dim() > 0, "x must have at least 1 dimension");
  const int64_t size = x.size(dim);
  if (size % 2 != 0) {
    refuse("the dimension to split must be even; dimension " + std::to_string(dim) + " of x is " +
           std::to_string(size));
  }
  return {x.narrow(dim, 0, size / 2), x.narrow(dim, size / 2, size / 2)};
}

// x [rows, 2 * columns] -> out [rows, columns], both dense.
template <class T>
void swiglu_rows(const Tensor& x, const Tensor& out, int64_t columns) {
  const T* source = x.const_data_ptr<T>();
  T* target = out.mutable_data_ptr<T>();
  at::parallel_for(0, out.numel() / columns, std::max<int64_t>(1, kGrainElements / columns),
                   [&](int64_t begin, int64_t end) {
                     std::vector<float> gate(columns);
                     std::vector<float> value(columns);
                     for (int64_t i = begin; i < end; ++i) {
                       const T* row = source + 2 * i * columns;
                       float_rows::load(row, gate.data(), columns);
                       float_rows::load(row + columns, value.data(), columns);
                       float_rows::silu_multiply(gate.data(), value.data(), gate.data(), columns);
                       float_rows::store(gate.data(), target + i * columns, columns);
                     }
                   });
}

// How a gated activation splits its input and what it does to the halves.
struct Gate {
  bool interleaved =
      false;  // gate at even, value at odd positions; otherwise first and second half
  bool activate_left = true;
  bool clipped = false;  // the variant below; otherwise silu(gate) * value
  double alpha = 1;      // gate' = min(gate, limit); value' = clamp(value, -limit, limit)
  double limit = 0;      // gate' * sigmoid(alpha * gate') * (value' + bias)
  double bias = 0;
};

// x float32, split along its last dimension.
Tensor gated(const Tensor& x, const Gate& gate) {
  auto [left, right] = halves(x, -1);
  if (gate.interleaved) {
    left = x.slice(-1, 0, std::nullopt, 2);
    right = x.slice(-1, 1, std::nullopt, 2);
  } else if (!gate.activate_left) {
    std::swap(left, right);
  }
  if (!gate.clipped) return at::silu(left) * right;
  const Tensor glu = left.clamp_max(gate.limit);
  return glu * at::sigmoid(glu * gate.alpha) * (right.clamp(-gate.limit, gate.limit) + gate.bias);
}

// The group of each row, from the groups' ends (cumulative) or sizes; rows after the last group
// belong to none. Without groups every row is of group 0.
Tensor row_groups(const OptionalTensor& group_index, bool cumulative, int64_t rows) {
  if (!group_index) return at::zeros({rows}, at::kLong);
  Tensor counts = group_index->to(at::kLong);
  if (cumulative) counts = at::diff(counts, 1, -1, at::zeros({1}, at::kLong));
  const int64_t total = counts.sum().item<int64_t>();
  if (total > rows || counts.lt(0).any().item<bool>()) {
    refuse("group_index covers " + std::to_string(total) + " rows with sizes " + c10::str(counts) +
           ", but x has " + std::to_string(rows) + " rows");
  }
  return at::repeat_interleave(counts);
}

// A parameter per group, [groups, columns] or [groups] (or without the first, for one group), as
// float32 rows that broadcast over `groups` [rows].
Tensor per_row(const Tensor& parameter, const Tensor& groups, int64_t columns) {
  Tensor wide = parameter.to(at::kFloat);
  if (wide.dim() == 1) wide = wide.size(0) == columns ? wide.unsqueeze(0) : wide.unsqueeze(1);
  return wide.index_select(0, groups);
}

bool is_dynamic(const Text& quant_mode) {
  if (quant_mode == "dynamic") return true;
  if (!quant_mode.empty() && quant_mode != "static") {
    refuse("quantMode is \"" + quant_mode + "\"; \"static\" and \"dynamic\" exist");
  }
  return false;
}

void require_int8(int64_t dst_type) {
  constexpr int64_t kInt8 = 2;  // aclDataType
  if (dst_type != kInt8) {
    refuse("dstType is " + std::to_string(dst_type) + "; only int8 (2) has arithmetic here");
  }
}

// values [rows, columns] -> the first rows of y and, when dynamic, of scale.
void store_quantized(const Tensor& values, bool dynamic, const Tensor& y, const Tensor& scale) {
  const Tensor rows = y.view({-1, values.size(-1)}).narrow(0, 0, values.size(0));
  if (!dynamic) {
    store(rows, to_int8(values));
    return;
  }
  const auto [quantized, scales] = quantize_rows(values);
  store(rows, quantized);
  store(scale.view({-1}).narrow(0, 0, values.size(0)), scales);
}

struct DequantSwigluQuant {
  Tensor x;
  OptionalTensor weight_scale, activation_scale, bias, quant_scale, quant_offset, group_index;
  Text quant_mode;
  Gate gate;
};

void dequant_swiglu_quant(const DequantSwigluQuant& a, const Tensor& y, const Tensor& scale) {
  const int64_t columns = a.x.size(-1);
  const Tensor groups = row_groups(a.group_index, /*cumulative=*/false, a.x.numel() / columns);
  const int64_t rows = groups.size(0);
  if (rows == 0) return;
  Tensor x = a.x.reshape({-1, columns}).narrow(0, 0, rows);
  Tensor bias;  // [rows, columns], or [columns] for all
  if (a.bias) bias = a.bias->dim() == 2 ? a.bias->index_select(0, groups) : *a.bias;
  const bool integer_bias = bias.defined() && bias.scalar_type() == at::kInt;
  if (integer_bias) x = x + bias;
  x = x.to(at::kFloat);
  if (a.weight_scale) x = x * per_row(*a.weight_scale, groups, columns);
  if (a.activation_scale) x = x * a.activation_scale->reshape({-1, 1}).narrow(0, 0, rows);
  if (bias.defined() && !integer_bias) x = x + bias.to(at::kFloat);
  Tensor values = gated(x, a.gate);
  const bool dynamic = is_dynamic(a.quant_mode);
  if (a.quant_scale) {
    const Tensor factors = per_row(*a.quant_scale, groups, columns / 2);
    values = dynamic ? values * factors : values / factors;
  }
  if (!dynamic && a.quant_offset) values = values + per_row(*a.quant_offset, groups, columns / 2);
  store_quantized(values, dynamic, y, scale);
}

}  // namespace

static Rules rules_of_swi_glu() {
  return {"ops-nn activation/swi_glu/docs/aclnnSwiGlu.md, parameters",
          {{"x",
            {dtype(kFloats), contiguous(),
             fits("have an even size in dimension dim", {"dim"},
                  [](const RuleArguments& own) {
                    const int64_t size = size_of(own.tensor(), static_cast<int>(own.integer(1)));
                    return size % 2 == 0;
                  })}},
           {"x", {dtype({at::kFloat, at::kHalf}), not_empty()}, {.chips = k310P}},
           {"out", {same_dtype("x"), contiguous()}}},
          {.bytes = 16 * kMiB}};
}
// silu(first half) * second half
VNPU_OPERATOR(SwiGlu, (const Tensor& x, int64_t dim, Out out),
              {.tier = kT2, .cost = elements<10>, .rules = rules_of_swi_glu()}) {
  const auto [gate, value] = halves(x, dim);
  if (out.tensor.numel() == 0) return;
  const ScalarType type = x.scalar_type();
  const bool last = dim == -1 || dim == x.dim() - 1;
  if (last && type == at::kBFloat16 && out.tensor.scalar_type() == type && x.is_contiguous() &&
      out.tensor.is_contiguous()) {
    swiglu_rows<at::BFloat16>(x, out.tensor, gate.size(-1));
  } else if (last && type == at::kFloat && out.tensor.scalar_type() == type && x.is_contiguous() &&
             out.tensor.is_contiguous()) {
    swiglu_rows<float>(x, out.tensor, gate.size(-1));
  } else {
    store(out, at::silu(widen(gate)).mul_(widen(value)));
  }
}

VNPU_OPERATOR(ClippedSwiglu,
              (const Tensor& x, const OptionalTensor& group_index, int64_t dim, double alpha,
               double limit, double bias, bool interleaved, Out out),
              {.tier = kT2,
               .cost = elements<10>,
               .rules = {"ops-nn activation/clipped_swiglu/docs/aclnnClippedSwiglu.md, parameters",
                         {{"x", {dtype(kFloats), dims(1, 8)}},
                          {"group_index", {dtype({at::kLong}), dims(1, 1)}},
                          {"out", same_dtype("x")}},
                         {},
                         kBigChips}}) {
  // The dimensions before `dim` are the rows that groups count; those after it are part of a row.
  const int64_t axis = dim < 0 ? dim + x.dim() : dim;
  require(axis >= 0 && axis < x.dim(), "dim is out of range");
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, axis));
  if (x.numel() == 0) return;
  const Tensor source = x.reshape({rows, -1}).to(at::kFloat);
  const int64_t used = row_groups(group_index, /*cumulative=*/false, rows).size(0);
  const Tensor y = gated(
      source.narrow(0, 0, used),
      {.interleaved = interleaved, .clipped = true, .alpha = alpha, .limit = limit, .bias = bias});
  store(out.tensor.view({rows, -1}).narrow(0, 0, used), y);
}

// --- with quantisation
// -----------------------------------------------------------------------------
VNPU_OPERATOR(SwiGluQuantV2,
              (const Tensor& x, const OptionalTensor& smooth_scales, const OptionalTensor& offsets,
               const OptionalTensor& group_index, bool activate_left, const Text& quant_mode,
               int64_t group_list_type, int64_t dst_type, Out y, Out scale),
              {.tier = kT2, .cost = elements<10>}) {
  require_int8(dst_type);
  const int64_t columns = x.size(-1);
  const Tensor groups = row_groups(group_index, group_list_type == 0, x.numel() / columns);
  const int64_t rows = groups.size(0);
  if (rows == 0) return;
  Tensor values = gated(x.reshape({-1, columns}).narrow(0, 0, rows).to(at::kFloat),
                        {.activate_left = activate_left});
  const bool dynamic = is_dynamic(quant_mode);
  if (smooth_scales) values = values * per_row(*smooth_scales, groups, columns / 2);
  if (!dynamic && offsets) values = values + per_row(*offsets, groups, columns / 2);
  store_quantized(values, dynamic, y.tensor, scale.tensor);
  // Unlike other operators' scales, the factor by which values were multiplied. Source: ops-nn
  // quant/swi_glu_quant/docs/aclnnSwiGluQuantV2.md, and ComputeQuant in its kernel.
  if (dynamic) scale.tensor.view({-1}).narrow(0, 0, rows).reciprocal_();
}

// op-plugin's page excludes a bias beside groups; the operator's own page and check have one.
constexpr char kSwigluBias[] = "CheckBias in dequant_swiglu_quant_tiling.cpp of ops-nn";
static Condition in_groups() { return is_given("group_index"); }
static Check a_row_for_each_group() {
  return fits("have a row for each group", {"group_index"}, [](const RuleArguments& own) {
    const int64_t groups = size_of(own.tensor(1), 0);
    const TensorView& values = own.tensor();
    const int64_t rows = values.dims == 1 ? 1 : size_of(values, 0);
    return own.tensor(1).numel() == 0 || rows == groups;
  });
}
static Rules rules_of_dequant_swiglu_quant() {
  return {"op-plugin torch_npu-npu_dequant_swiglu_quant.md, constraints",
          {{"x",
            {dtype({at::kInt, at::kHalf, at::kBFloat16}), contiguous(),
             size_between(-1, 2, 1 << 30, 2)}},
           {"x",
            size_between(-1, 64, 1 << 30, 64).when(in_groups()),
            "dequant_swiglu_quant_tiling.cpp",
            {.tiling = true}},
           {"x",
            size_between(-1, 2, 7232).when(in_groups()),
            "aclnnDequantSwigluQuantV2.md, constraints: x's last dimension",
            {.until = CannRelease::k8_5, .tiling = true}},
           {"x",
            size_between(-1, 2, 10496).when(in_groups()),
            "op-plugin torch_npu-npu_dequant_swiglu_quant.md: x's last dimension",
            {.since = CannRelease::k9_0, .tiling = true}},
           {"weight_scale", {dtype({at::kFloat}), same_size(-1, "x", -1), a_row_for_each_group()}},
           {"weight_scale", present().when(has_dtype("x", {at::kInt}))},
           {"activation_scale", {dtype({at::kFloat}), entry_for_each_row_of_x()}},
           {"group_index", {dtype({at::kLong}), dims(1, 1)}},
           {"bias",
            {dtype({at::kInt, at::kFloat, at::kHalf, at::kBFloat16}), same_size(-1, "x", -1),
             a_row_for_each_group()},
            kSwigluBias},
           {"quant_offset", absent().when(equals("quant_mode", "dynamic"))},
           {"quant_mode", one_of("", "static", "dynamic")},
           {"y", dtype({at::kChar})}},
          {.bytes = 32 * kMiB},
          kBigChips};
}
// Rows that belong to no group are neither read nor written.
static void cost_of_dequant_swiglu_quant(const Call& call, Work& work) {
  const TensorView& x = call.tensor("x");
  const int64_t rows = size_of(x, -1) > 0 ? x.numel() / size_of(x, -1) : 0;
  const int64_t live = call.has("group_index") ? routed_rows(rows) : rows;
  if (rows == 0) return;
  work.read_bytes = bytes_of(x) / rows * live;
  work.written_bytes = bytes_of(call.tensor("y")) / rows * live;
  work.vector_operations = 10 * (x.numel() / rows) * live;
  work.wide = true;
}
VNPU_OPERATOR(
    DequantSwigluQuant,
    (const Tensor& x, const OptionalTensor& weight_scale, const OptionalTensor& activation_scale,
     const OptionalTensor& bias, const OptionalTensor& quant_scale,
     const OptionalTensor& quant_offset, const OptionalTensor& group_index, bool activate_left,
     const Text& quant_mode, Out y, Out scale),
    {.tier = kT2, .cost = cost_of_dequant_swiglu_quant, .rules = rules_of_dequant_swiglu_quant()}) {
  dequant_swiglu_quant({x,
                        weight_scale,
                        activation_scale,
                        bias,
                        quant_scale,
                        quant_offset,
                        group_index,
                        quant_mode,
                        {.activate_left = activate_left}},
                       y.tensor, scale.tensor);
}
// swigluMode: 0 silu on halves, 1 the clipped variant on even and odd, 2 the clipped one on halves.
VNPU_OPERATOR(
    DequantSwigluQuantV2,
    (const Tensor& x, const OptionalTensor& weight_scale, const OptionalTensor& activation_scale,
     const OptionalTensor& bias, const OptionalTensor& quant_scale,
     const OptionalTensor& quant_offset, const OptionalTensor& group_index, bool activate_left,
     const Text& quant_mode, int64_t dst_type, const Text& round_mode, int64_t activate_dim,
     int64_t swiglu_mode, double clamp_limit, double glu_alpha, double glu_bias, Out y, Out scale),
    {.tier = kT2, .cost = cost_of_dequant_swiglu_quant, .rules = rules_of_dequant_swiglu_quant()}) {
  require_int8(dst_type);
  require(round_mode.empty() || round_mode == "rint", "only roundMode \"rint\" exists here");
  require(activate_dim == -1 || activate_dim == x.dim() - 1,
          "activateDim must be the last dimension");
  dequant_swiglu_quant({x,
                        weight_scale,
                        activation_scale,
                        bias,
                        quant_scale,
                        quant_offset,
                        group_index,
                        quant_mode,
                        {.interleaved = swiglu_mode == 1,
                         .activate_left = activate_left,
                         .clipped = swiglu_mode != 0,
                         .alpha = glu_alpha,
                         .limit = clamp_limit,
                         .bias = glu_bias}},
                       y.tensor, scale.tensor);
}

}  // namespace vnpu::ops
