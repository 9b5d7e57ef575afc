// Numbers to 8-bit and 4-bit integers and back. Rounding is to the nearest, halves to even, unless
// a mode says otherwise; results are clamped to the range of the type.

#include "ops/matmul/integer_matrices.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kAclInt8 = 2;   // aclDataType
constexpr int64_t kAclInt32 = 3;  // eight 4-bit integers each
constexpr int64_t kAclInt4 = 29;

Tensor rounded(const Tensor& x, const Text& mode) {
  if (mode.empty() || mode == "round" || mode == "rint") return x.round();
  if (mode == "floor") return x.floor();
  if (mode == "ceil") return x.ceil();
  if (mode == "trunc") return x.trunc();
  refuse("roundMode '" + mode + "' is not known; use round, floor, ceil or trunc.");
}

// Writes integers to y, which is int8, or int32 that holds eight 4-bit integers.
void store_integers(const Out& y, const Tensor& values) {
  if (y.tensor.scalar_type() == at::kInt) {
    store(y, pack_int4(values.clamp(-8, 7).to(at::kChar)));
  } else if (y.tensor.scalar_type() == at::kChar) {
    store(y, to_int8(values));
  } else {
    refuse(std::string("results are int8, or int32 that holds 4-bit integers, not ") +
           c10::toString(y.tensor.scalar_type()) + ".");
  }
}

// Quantizes with ranges taken from the values themselves.
struct DynamicRange {
  OptionalTensor smooth;  // [columns], or [groups, columns] with groups: multiplies first
  OptionalTensor group_ends;
  bool symmetric = true;
  Text over = "pertoken";  // unit with one range
};

void quantize_dynamically(const Tensor& x, const DynamicRange& how, const Out& y, const Out& scale,
                          const OptionalOut& offset) {
  if (x.numel() == 0) return;
  Tensor wide = x.to(at::kFloat);
  if (how.smooth) {
    Tensor smooth = how.smooth->to(at::kFloat);
    if (how.group_ends) {  // rows up to an end belong to its group; the rest to none
      const Tensor rows = at::arange(x.numel() / x.size(-1), at::kLong);
      const Tensor group = at::bucketize(rows, how.group_ends->to(at::kLong), /*out_int32=*/false,
                                         /*right=*/true);
      smooth = smooth.index_select(0, group.clamp_max(smooth.size(0) - 1)).view(wide.sizes());
    }
    wide = wide * smooth;
  }
  std::vector<int64_t> dims;  // that share a range
  if (how.over.empty() || how.over == "pertoken") {
    dims = {-1};
  } else if (how.over == "perchannel") {
    dims = {-2};
  } else if (how.over == "pertensor") {
    for (int64_t i = 0; i < wide.dim(); ++i) dims.push_back(i);
  } else {
    refuse("quantMode '" + how.over + "' is not known; use pertoken, perchannel or pertensor.");
  }
  const bool four_bits = y.tensor.scalar_type() == at::kInt;
  const double most = four_bits ? 7 : 127;
  const auto shaped = [](const Tensor& values, const Tensor& like) {
    return values.reshape(like.sizes());
  };
  if (how.symmetric) {
    const Tensor step = wide.abs().amax(dims, /*keepdim=*/true) / most;
    // A row of zeros has no range; its integers are zero.
    store_integers(y, at::nan_to_num(wide / step, 0.0).round());
    store(scale, shaped(step, scale.tensor));
    return;
  }
  require(bool(offset), "asymmetric quantization needs an output for the offset.");
  const Tensor high = wide.amax(dims, /*keepdim=*/true);
  const Tensor step = (high - wide.amin(dims, /*keepdim=*/true)) / (2 * most + 1);
  const Tensor shift = most - high / step;
  store_integers(y, at::nan_to_num(wide / step + shift, 0.0).round());
  store(scale, shaped(step, scale.tensor));
  store(offset, shaped(shift, *offset.tensor));
}

void require_integer_type(int64_t type) {
  if (type != kAclInt8 && type != kAclInt32 && type != kAclInt4) {
    refuse("dstType " + std::to_string(type) +
           " is not supported; use int8 (2) or int4 (29, 3 packed).");
  }
}

// Parameters along one axis of x, or one for all.
Tensor along(const Tensor& parameter, const Tensor& x, int64_t axis) {
  const Tensor wide = parameter.to(at::kFloat);
  if (wide.numel() == 1) return wide.reshape({});
  if (wide.dim() != 1) return wide;  // broadcasts as it is
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[static_cast<size_t>(at::maybe_wrap_dim(axis, x.dim()))] = wide.size(0);
  return wide.view(sizes);
}

void quantize_statically(const Tensor& x, const Tensor& scale, const OptionalTensor& offset,
                         bool squared, const Text& round_mode, int64_t type, int64_t axis,
                         const Out& y) {
  require_integer_type(type);
  if (x.numel() == 0) return;
  Tensor factor = along(scale, x, axis);
  if (squared) factor = factor * factor;
  Tensor values = x.to(at::kFloat) * factor;
  if (offset) values = values + along(*offset, x, axis);
  store_integers(y, rounded(values, round_mode));
}

// A float's sign, exponent and upper 10 mantissa bits, as the device reads them, with a mark at bit
// 46 and, if there is one, a 9-bit offset from bit 37 on.
void pack_parameters(const Tensor& scale, const OptionalTensor& offset, bool round,
                     const Out& out) {
  Tensor bits = scale.to(at::kFloat)
                    .contiguous()
                    .view(at::kInt)
                    .to(at::kLong)
                    .bitwise_and(INT64_C(0xffffffff));
  if (round) bits = bits + 0xfff + bits.bitwise_right_shift(13).bitwise_and(1);
  bits = bits.bitwise_and(INT64_C(0xffffe000)).bitwise_or(INT64_C(1) << 46);
  if (offset) {
    const Tensor integers = offset->to(at::kFloat).round().clamp(-256, 255).to(at::kLong);
    bits = bits.bitwise_or(integers.bitwise_and(0x1ff).bitwise_left_shift(37));
  }
  store(out.tensor.view(at::kLong), bits);
}

}  // namespace

constexpr char kDynamic[] = "op-plugin torch_npu-npu_dynamic_quant.md, parameters";
static std::vector<Rule> dynamic_rules() {
  return {{"x", {dtype(kHalves), dims(2, 8)}},
          {"scale", {dtype({at::kFloat}), entry_for_each_row_of_x()}},
          {"smooth", same_dtype("x")},
          {"y", same_sizes("x").when(has_dtype("y", {at::kChar}))}};
}
VNPU_OPERATOR(DynamicQuant, (const Tensor& x, const OptionalTensor& smooth, Out y, Out scale),
              {.tier = kT2,
               .cost = elements<6>,
               .rules = {
                   kDynamic, dynamic_rules(), {.bytes = 16 * kMiB, .copies = true}, kBigChips}}) {
  quantize_dynamically(x, {smooth, {}}, y, scale, {});
}
VNPU_OPERATOR(DynamicQuantV2,
              (const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& groups,
               int64_t type, Out y, Out scale, OptionalOut offset),
              {.tier = kT2,
               .cost = elements<6>,
               .rules = {kDynamic,
                         joined(dynamic_rules(),
                                {{"offset", {dtype({at::kFloat}), same_sizes("scale")}}}),
                         {.bytes = 16 * kMiB, .copies = true},
                         kBigChips}}) {
  require_integer_type(type);
  quantize_dynamically(x, {smooth, groups, !offset}, y, scale, offset);
}
VNPU_OPERATOR(DynamicQuantV3,
              (const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& groups,
               int64_t type, bool symmetric, const Text& over, Out y, Out scale,
               OptionalOut offset),
              {.tier = kT2, .cost = elements<6>}) {
  require_integer_type(type);
  quantize_dynamically(x, {smooth, groups, symmetric, over}, y, scale, offset);
}
VNPU_OPERATOR(DynamicQuantV4,
              (const Tensor& x, const OptionalTensor& smooth, const OptionalTensor& groups,
               int64_t type, bool symmetric, const Text& over, float largest, Out y, Out scale,
               OptionalOut offset),
              {.tier = kT2, .cost = elements<6>}) {
  require_integer_type(type);
  require(largest == 0, "dstTypeMax belongs to hifloat8, which is not supported.");
  quantize_dynamically(x, {smooth, groups, symmetric, over}, y, scale, offset);
}

static Rules rules_of_ascend_quant() {
  return {"ops-nn quant/ascend_quant_v2/docs/aclnnAscendQuantV3.md",
          {{"x", dtype({at::kFloat, at::kHalf, at::kBFloat16})},
           {"scale", same_dtype("x")},
           {"offset", {same_dtype("scale"), same_sizes("scale")}}},
          {.bytes = 16 * kMiB, .copies = true},
          kBigChips};
}
// round(x * scale + offset)
VNPU_OPERATOR(AscendQuant,
              (const Tensor& x, const Tensor& scale, const OptionalTensor& offset, bool squared,
               const Text& round_mode, int32_t type, Out y),
              {.tier = kT2, .cost = elements<3>, .rules = rules_of_ascend_quant()}) {
  quantize_statically(x, scale, offset, squared, round_mode, type, -1, y);
}
VNPU_OPERATOR(AscendQuantV3,
              (const Tensor& x, const Tensor& scale, const OptionalTensor& offset, bool squared,
               const Text& round_mode, int32_t type, int32_t axis, Out y),
              {.tier = kT2, .cost = elements<3>, .rules = rules_of_ascend_quant()}) {
  quantize_statically(x, scale, offset, squared, round_mode, type, axis, y);
}

static Check one_or_axis_of(const char* other) {
  return fits("have one entry, or one for each of x's last dimension", {other},
              [](const RuleArguments& own) {
                const int64_t entries = own.tensor().numel();
                return entries == 1 || entries == size_of(own.tensor(1), -1);
              });
}
static Rules rules_of_quantize() {
  return {"op-plugin torch_npu-npu_quantize.md, parameters",
          {{"x", dtype({at::kFloat, at::kHalf, at::kBFloat16})},
           {"scales", {dtype({at::kFloat, at::kBFloat16}), dims(1, 1)}},
           {"scales", one_or_axis_of("x").when(equals("axis", -1))},
           {"zero_points",
            {dtype({at::kChar, at::kByte, at::kInt, at::kBFloat16}), same_sizes("scales")}},
           {"scales", dtype({at::kBFloat16}).when(has_dtype("zero_points", {at::kBFloat16}))},
           {"x", dtype({at::kBFloat16}).when(has_dtype("scales", {at::kBFloat16}))}},
          {.bytes = 16 * kMiB, .copies = true},
          kBigChips};
}
// round(x / scale + zero_point)
VNPU_OPERATOR(Quantize,
              (const Tensor& x, const Tensor& scales, const OptionalTensor& zero_points, DType type,
               int32_t axis, Out out),
              {.tier = kT2, .cost = elements<3>, .rules = rules_of_quantize()}) {
  if (x.numel() == 0) return;
  Tensor values = x.to(at::kFloat) / along(scales, x, axis);
  if (zero_points) values = values + along(*zero_points, x, axis);
  values = at::nan_to_num(values.round(), 0.0);
  switch (type.type) {
    case at::kChar: store(out, values.clamp(-128, 127)); return;
    case at::kByte: store(out, values.clamp(0, 255)); return;
    case at::kInt:  // in double, where the limits of int32 are numbers
      store(out, values.to(at::kDouble).clamp(-2147483648.0, 2147483647.0));
      return;
    default:
      refuse(std::string("dtype ") + c10::toString(type.type) +
             " is not supported; use int8, uint8 or int32.");
  }
}

VNPU_OPERATOR(TransQuantParamV2, (const Tensor& scale, const OptionalTensor& offset, Out out),
              {.tier = kT2, .cost = elements<3>}) {
  pack_parameters(scale, offset, false, out);
}
VNPU_OPERATOR(TransQuantParamV3,
              (const Tensor& scale, const OptionalTensor& offset, int64_t round_mode, Out out),
              {.tier = kT2, .cost = elements<3>}) {
  pack_parameters(scale, offset, round_mode == 1, out);
}

static Rules rules_of_dequant_bias() {
  return {
      "ops-nn quant/dequant_bias/docs/aclnnDequantBias.md, constraints",
      {{"x", {dtype({at::kInt}), dims(2, 2), contiguous()}},
       {"x", size_between(0, 1, 25000), {.tiling = true}},
       {"weight_scale", {dtype({at::kFloat, at::kBFloat16}), contiguous(), same_size(0, "x", 1)}},
       {"weight_scale", dtype({at::kFloat}).when(has_dtype("out", {at::kHalf}))},
       {"weight_scale", dtype({at::kBFloat16}).when(has_dtype("out", {at::kBFloat16}))},
       {"activation_scale", {dtype({at::kFloat}), contiguous(), same_size(0, "x", 0)}},
       {"bias", dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kInt})},
       {"out", dtype({at::kHalf, at::kBFloat16})}},
      {.bytes = 16 * kMiB},
      kBigChips};
}
// x int32 [m, n] -> (x + bias) * weight_scale [n] * activation_scale [m], where an integer bias is
// added before and another one after scaling.
VNPU_OPERATOR(DequantBias,
              (const Tensor& x, const Tensor& weight_scale, const OptionalTensor& activation_scale,
               const OptionalTensor& bias, int64_t, Out out),
              {.tier = kT2, .cost = elements<3>, .rules = rules_of_dequant_bias()}) {
  if (x.numel() == 0) return;
  const bool integer_bias = bias && bias->scalar_type() == at::kInt;
  Tensor values = (integer_bias ? x + *bias : x).to(at::kFloat) * weight_scale.to(at::kFloat);
  if (activation_scale) values = values * activation_scale->to(at::kFloat).reshape({-1, 1});
  if (bias && !integer_bias) values = values + bias->to(at::kFloat);
  store(out, values);
}

}  // namespace vnpu::ops
