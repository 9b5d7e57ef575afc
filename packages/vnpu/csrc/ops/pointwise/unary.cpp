// Element-wise functions of one tensor: mathematics, rounding, tests and activations.

#include "ops/pointwise/rows.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

// One row each for the out-of-place and the in-place form of an ATen function `f_out(out, self)`.
// --- mathematics --------------------------------------------------------------------------------

VNPU_UNARY(Abs, at::abs_out,
           {.cost = elements<1>,
            .rules = {"ASCEND910B_DTYPE_DTYPE_SUPPORT_LIST in aclnn_abs.cpp",
                      {{"self", dtype(with(kRealAndBool, {at::kComplexFloat})), kOnBigChips}}}})
const std::vector<ScalarType> kFloatsAndComplex{at::kFloat,  at::kHalf,         at::kBFloat16,
                                                at::kDouble, at::kComplexFloat, at::kComplexDouble};
VNPU_UNARY(Neg, at::neg_out,
           {.cost = elements<1>,
            .rules = {"aclnn_neg.cpp: dtype_support_list_afterV200, CheckShape",
                      {{"self", dtype(with(kFloatsAndComplex, {at::kChar, at::kInt, at::kLong})),
                        kOnBigChips},
                       {"out", same_sizes("self")}}}})
VNPU_UNARY(Exp, at::exp_out,
           {.cost = elements<10>,
            .rules = {
                "aclnn_exp.cpp: DTYPE_SUPPORT_LIST_910B, CheckShape",
                {{"self", dtype(with(kFloatsAndComplex, {at::kBool, at::kLong})), kOnBigChips},
                 {"out", same_sizes("self")}}}})
VNPU_UNARY(Exp2, at::exp2_out,
           {.cost = elements<10>,
            .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_exp2.cpp",
                      {{"self", dtype(kRealAndBool), kOnBigChips}}}})
VNPU_UNARY(Expm1, at::expm1_out, {.cost = elements<10>})
VNPU_UNARY(Log, at::log_out, {.cost = elements<10>})
VNPU_UNARY(Log2, at::log2_out, {.cost = elements<10>})
VNPU_UNARY(Log10, at::log10_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY(Log1p, at::log1p_out, {.cost = elements<10>})
VNPU_UNARY(Sqrt, at::sqrt_out, {.cost = elements<10>})
static Rules rules_of_cos() {
  return {"dtype lists in aclnn_{cos,sin,reciprocal,rsqrt,sigmoid}.cpp",
          {{"self", dtype(kNumbers), kOnBigChips},
           {"out", dtype(kFloatsAndComplex), kOnBigChips},
           {"out", same_sizes("self")}}};
}
VNPU_UNARY(Rsqrt, at::rsqrt_out, {.cost = elements<10>, .rules = rules_of_cos()})
VNPU_UNARY(Reciprocal, at::reciprocal_out, {.cost = elements<10>, .rules = rules_of_cos()})
VNPU_UNARY(Sin, at::sin_out, {.cost = elements<10>, .rules = rules_of_cos()})
VNPU_UNARY(Cos, at::cos_out, {.cost = elements<10>, .rules = rules_of_cos()})
VNPU_UNARY(Tan, at::tan_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY(Erf, at::erf_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceExp, at::exp_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceExp2, at::exp2_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceExpm1, at::expm1_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceLog, at::log_out,
                   {.cost = elements<10>,
                    .rules = {"ASCEND910B_OUTPUT_DTYPE_SUPPORT_LIST in aclnn_log.cpp",
                              {{"self", dtype(kFloatsAndComplex), kOnBigChips}}}})
VNPU_UNARY_INPLACE(InplaceLog2, at::log2_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceLog10, at::log10_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceLog1p, at::log1p_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceSqrt, at::sqrt_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceRsqrt, at::rsqrt_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceReciprocal, at::reciprocal_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceSin, at::sin_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceCos, at::cos_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceErf, at::erf_out, {.tier = kOther, .cost = elements<10>})

// Functions that ATen has no 16-bit kernel of, or that turn integers into floats.
#define VNPU_WIDENED(NAME, FUNCTION, ...)                           \
  VNPU_OPERATOR(NAME, (const Tensor& self, Out out), __VA_ARGS__) { \
    store(out, FUNCTION(widen(self)));                              \
  }
#define VNPU_WIDENED_INPLACE(NAME, FUNCTION, ...) \
  VNPU_OPERATOR(NAME, (InOut self), __VA_ARGS__) { store(self, FUNCTION(widen(self.tensor))); }

#define VNPU_WIDENED_BOTH(NAME, FUNCTION)                              \
  VNPU_WIDENED(NAME, FUNCTION, {.tier = kOther, .cost = elements<10>}) \
  VNPU_WIDENED_INPLACE(Inplace##NAME, FUNCTION, {.tier = kOther, .cost = elements<10>})

VNPU_WIDENED_BOTH(Acos, at::acos)
VNPU_WIDENED_BOTH(Acosh, at::acosh)
VNPU_WIDENED_BOTH(Asin, at::asin)
VNPU_WIDENED_BOTH(Asinh, at::asinh)
VNPU_WIDENED_BOTH(Atan, at::atan)
VNPU_WIDENED_BOTH(Atanh, at::atanh)
VNPU_WIDENED_BOTH(Cosh, at::cosh)
VNPU_WIDENED_BOTH(Sinh, at::sinh)
VNPU_WIDENED_BOTH(Erfc, at::erfc)
VNPU_WIDENED_BOTH(Erfinv, at::erfinv)
VNPU_WIDENED_INPLACE(InplaceTan, at::tan, {.tier = kOther, .cost = elements<10>})

// --- rounding and sign --------------------------------------------------------------------------

VNPU_UNARY(Floor, at::floor_out, {.cost = elements<1>})
static Rules rules_of_ceil() {
  return {"aclnn_ceil.cpp: ASCEND910B_DTYPE_DTYPE_SUPPORT_LIST, CheckDtypeValid, CheckParamsCeil",
          {{"self", dtype(with(kFloats, {at::kDouble})), kOnBigChips},
           {"out", {same_dtype("self"), same_sizes("self")}}}};
}
VNPU_UNARY(Ceil, at::ceil_out, {.cost = elements<1>, .rules = rules_of_ceil()})
VNPU_UNARY(Round, at::round_out,
           {.cost = elements<1>,
            .rules = {"ASCEND910B_DTYPE_DTYPE_SUPPORT_LIST in aclnn_round.cpp",
                      {{"self", dtype(with(kFloats, {at::kDouble, at::kInt, at::kLong})),
                        kOnBigChips}}}})  // half to even
VNPU_UNARY(Trunc, at::trunc_out, {.cost = elements<1>})
VNPU_UNARY(Sign, at::sgn_out, {.cost = elements<1>})  // complex numbers too
VNPU_UNARY_INPLACE(InplaceFloor, at::floor_out, {.cost = elements<1>})
VNPU_UNARY_INPLACE(InplaceCeil, at::ceil_out, {.cost = elements<1>})

VNPU_OPERATOR(RoundDecimals, (const Tensor& self, int64_t decimals, Out out),
              {.cost = elements<1>}) {
  at::round_out(out.tensor, self, decimals);
}

// --- special values -----------------------------------------------------------------------------

VNPU_UNARY(IsNegInf, at::isneginf_out, {.cost = elements<1>})
VNPU_UNARY(IsPosInf, at::isposinf_out, {.cost = elements<1>})
VNPU_OPERATOR(IsFinite, (const Tensor& self, Out out), {.cost = elements<1>}) {
  store(out, at::isfinite(self));
}
VNPU_OPERATOR(NanToNum, (const Tensor& self, float nan, float posinf, float neginf, Out out),
              {.cost = elements<1>}) {
  at::nan_to_num_out(out.tensor, self, nan, posinf, neginf);
}
VNPU_OPERATOR(InplaceNanToNum, (InOut self, float nan, float posinf, float neginf),
              {.cost = elements<1>}) {
  self.tensor.nan_to_num_(nan, posinf, neginf);
}

// --- activations --------------------------------------------------------------------------------

VNPU_UNARY(Sigmoid, at::sigmoid_out, {.cost = elements<10>, .rules = rules_of_cos()})
VNPU_UNARY(Tanh, at::tanh_out,
           {.cost = elements<10>,
            .rules = {"aclnnTanh&aclnnInplaceTanh.md, parameters",
                      {{"self",
                        dtype(with(kFloats, {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt,
                                             at::kLong})),
                        kOnBigChips},
                       {"out", dtype(kFloats), kOnBigChips},
                       {"out", same_sizes("self")}}}})
static Rules rules_of_gelu() {
  return {
      "DTYPE_SUPPORT_LIST in aclnn_{gelu,silu}.cpp",
      {{"self", dtype(kFloats), kOnBigChips}, {"out", {same_dtype("self"), same_sizes("self")}}}};
}
VNPU_UNARY(Silu, at::silu_out, {.cost = elements<10>, .rules = rules_of_gelu()})
VNPU_UNARY(Mish, at::mish_out, {.cost = elements<10>})
VNPU_UNARY(Hardswish, at::hardswish_out, {.cost = elements<10>})
VNPU_UNARY(Hardsigmoid, at::hardsigmoid_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceSigmoid, at::sigmoid_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceTanh, at::tanh_out, {.cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceMish, at::mish_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceHardswish, at::hardswish_out, {.tier = kOther, .cost = elements<10>})
VNPU_UNARY_INPLACE(InplaceHardsigmoid, at::hardsigmoid_out, {.tier = kOther, .cost = elements<10>})

constexpr char kRelu[] = "activation/relu/README.md, parameters";
static Rules rules_of_relu() {
  const auto dtypes = with(kFloats, {at::kChar, at::kByte, at::kInt, at::kLong});
  return {
      kRelu,
      {{"self", dtype(dtypes), kOnBigChips}, {"out", {same_dtype("self"), same_sizes("self")}}}};
}
VNPU_OPERATOR(Relu, (const Tensor& self, Out out),
              {.cost = elements<1>, .rules = rules_of_relu()}) {
  at::clamp_min_out(out.tensor, self, 0);
}

static Rules rules_of_inplace_relu() {
  const auto dtypes = with(kFloats, {at::kChar, at::kByte, at::kInt, at::kLong});
  return {kRelu, {{"self", dtype(dtypes), kOnBigChips}}};
}
VNPU_OPERATOR(InplaceRelu, (InOut self), {.cost = elements<1>, .rules = rules_of_inplace_relu()}) {
  self.tensor.relu_();
}
VNPU_OPERATOR(LeakyRelu, (const Tensor& self, const Scalar& negative_slope, Out out),
              {.cost = elements<1>}) {
  at::leaky_relu_out(out.tensor, self, negative_slope);
}
// The tanh form, as the device computes it (activation/gelu in hicann/ops-nn). torch_npu calls it
// for torch.nn.functional.gelu whatever `approximate` says, unless its compatible implementations
// are on (torch_npu.npu.use_compatible_impl): then it calls GeluV2 with the requested form.
VNPU_OPERATOR(Gelu, (const Tensor& self, Out out),
              {.cost = elements<10>, .rules = rules_of_gelu()}) {
  at::gelu_out(out.tensor, self, "tanh");
}
VNPU_OPERATOR(GeluV2, (const Tensor& x, int64_t approximate, Out out),
              {.cost = elements<10>,
               .rules = {"DTYPE_SUPPORT_LIST in aclnn_gelu_v2.cpp",
                         {{"x", dtype(kFloats), kOnBigChips},
                          {"out", {same_dtype("x"), same_sizes("x")}}}}}) {
  require(approximate == 0 || approximate == 1, "approximate must be 0 (erf) or 1 (tanh).");
  at::gelu_out(out.tensor, x, approximate == 1 ? "tanh" : "none");
}
VNPU_OPERATOR(Elu,
              (const Tensor& self, const Scalar& alpha, const Scalar& scale,
               const Scalar& input_scale, Out out),
              {.cost = elements<10>}) {
  at::elu_out(out.tensor, self, alpha, scale, input_scale);
}
VNPU_OPERATOR(Softplus, (const Tensor& self, const Scalar& beta, const Scalar& threshold, Out out),
              {.cost = elements<10>,
               .rules = {"aclnn_softplus.cpp: ASCEND910B_DTYPE_SUPPORT_LIST, CheckShape",
                         {{"self", dtype(kFloats), kOnBigChips}, {"out", same_sizes("self")}}}}) {
  at::softplus_out(out.tensor, self, beta, threshold);
}
VNPU_OPERATOR(Hardtanh,
              (const Tensor& self, const Scalar& clip_min, const Scalar& clip_max, Out out),
              {.cost = elements<1>}) {
  at::hardtanh_out(out.tensor, self, clip_min, clip_max);
}
VNPU_OPERATOR(Threshold,
              (const Tensor& self, const Scalar& threshold, const Scalar& value, Out out),
              {.tier = kOther, .cost = elements<1>}) {
  store(out, at::threshold(self, threshold, value));
}
VNPU_OPERATOR(LogSigmoid, (const Tensor& self, Out out), {.cost = elements<10>}) {
  store(out, at::log_sigmoid(self));
}
// `buffer` is for the gradient, which recomputes it.
VNPU_OPERATOR(LogSigmoidForward, (const Tensor& self, Out out, OptionalOut),
              {.tier = kOther, .cost = elements<10>}) {
  store(out, at::log_sigmoid(self));
}
// Halves of `dim`: first * sigmoid(second).
VNPU_OPERATOR(Glu, (const Tensor& self, int64_t dim, Out out), {.cost = elements<10>}) {
  at::glu_out(out.tensor, self, dim);
}

}  // namespace vnpu::ops
