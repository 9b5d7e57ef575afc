// Legacy operators on each element.

#include "ops/legacy/legacy_operator.h"

namespace vnpu::ops {
namespace {

using Unary = Tensor (*)(const Tensor&);
using Binary = Tensor (*)(const Tensor&, const Tensor&);

template <Unary kFunction>
Results one(const LegacyArguments& a) {
  return {kFunction(a[0])};
}
template <Binary kFunction>
Results two(const LegacyArguments& a) {
  return {kFunction(a[0], a[1])};
}

// --- mathematics ---------------------------------------------------------------------------------

const bool mathematics =
    legacy("Abs", one<at::abs>) && legacy("Neg", one<at::neg>) && legacy("Exp", one<at::exp>) &&
    legacy("Expm1", one<at::expm1>) && legacy("Log1p", one<at::log1p>) &&
    legacy("Sqrt", one<at::sqrt>) && legacy("Rsqrt", one<at::rsqrt>) &&
    legacy("Square", one<at::square>) && legacy("Reciprocal", one<at::reciprocal>) &&
    legacy("Sin", one<at::sin>) && legacy("Cos", one<at::cos>) && legacy("Tan", one<at::tan>) &&
    legacy("Asin", one<at::asin>) && legacy("Acos", one<at::acos>) &&
    legacy("Atan", one<at::atan>) && legacy("Sinh", one<at::sinh>) &&
    legacy("Cosh", one<at::cosh>) && legacy("Tanh", one<at::tanh>) &&
    legacy("Asinh", one<at::asinh>) && legacy("Acosh", one<at::acosh>) &&
    legacy("Atanh", one<at::atanh>) && legacy("Erf", one<at::erf>) &&
    legacy("Erfc", one<at::erfc>) && legacy("Floor", one<at::floor>) &&
    legacy("Ceil", one<at::ceil>) && legacy("Trunc", one<at::trunc>) &&
    legacy("Sign", one<at::sign>) && legacy("IsFinite", one<at::isfinite>) &&
    legacy("LogicalNot", one<at::logical_not>) && legacy("BitwiseNot", one<at::bitwise_not>) &&
    legacy("Invert", one<at::bitwise_not>);

// log(scale x + shift) to a base; -1 is e.
const bool logarithm = legacy("Log", [](const LegacyArguments& a) -> Results {
  const double base = a.real("base", -1);
  const double scale = a.real("scale", 1);
  const double shift = a.real("shift", 0);
  const Tensor x = scale == 1 && shift == 0 ? a[0] : widen(a[0]) * scale + shift;
  if (base == 2) return {at::log2(x)};
  if (base == 10) return {at::log10(x)};
  return {base <= 0 ? at::log(x) : at::log(widen(x)) / std::log(base)};
});
const bool round = legacy("Round", [](const LegacyArguments& a) -> Results {
  const int64_t decimals = a.integer("decimals", 0);
  return {decimals == 0 ? at::round(a[0]) : at::round(a[0], decimals)};
});

// --- arithmetic ----------------------------------------------------------------------------------

Tensor add(const Tensor& x, const Tensor& y) { return at::add(x, y); }
Tensor sub(const Tensor& x, const Tensor& y) { return at::sub(x, y); }
Tensor mul(const Tensor& x, const Tensor& y) { return at::mul(x, y); }
Tensor div(const Tensor& x, const Tensor& y) { return at::div(x, y); }
Tensor pow(const Tensor& x, const Tensor& y) { return at::pow(x, y); }
Tensor floor_divide(const Tensor& x, const Tensor& y) { return at::floor_divide(x, y); }
Tensor fmod(const Tensor& x, const Tensor& y) { return at::fmod(x, y); }
Tensor remainder(const Tensor& x, const Tensor& y) { return at::remainder(x, y); }

const bool arithmetic = legacy("Add", two<add>) && legacy("Sub", two<sub>) &&
                        legacy("Mul", two<mul>) && legacy("RealDiv Div", two<div>) &&
                        legacy("Pow", two<pow>) && legacy("FloorDiv", two<floor_divide>) &&
                        legacy("Mod", two<fmod>) && legacy("FloorMod", two<remainder>) &&
                        legacy("Atan2", two<at::atan2>) && legacy("Maximum", two<at::maximum>) &&
                        legacy("Minimum", two<at::minimum>);

// 16-bit floats are rounded once.
VNPU_LEGACY(axpy, "AxpyV2", widen(a[0]) + widen(a[1]) * widen(a[2]));
VNPU_LEGACY(addcmul, "Addcmul", widen(a[0]) + widen(a[3]) * widen(a[1]) * widen(a[2]));
VNPU_LEGACY(addcdiv, "Addcdiv", widen(a[0]) + widen(a[3]) * widen(a[1]) / widen(a[2]));
VNPU_LEGACY(lerp, "Lerp", at::lerp(a[0], a[1], a[2].to(a[0].scalar_type()).expand_as(a[0])));
VNPU_LEGACY(clip, "ClipByValue ClipByValueV2", at::clamp(a[0], a[1].reshape({}), a[2].reshape({})));

// --- comparison and logic ------------------------------------------------------------------------

Tensor equal(const Tensor& x, const Tensor& y) { return at::eq(x, y); }
Tensor not_equal(const Tensor& x, const Tensor& y) { return at::ne(x, y); }
Tensor greater(const Tensor& x, const Tensor& y) { return at::gt(x, y); }
Tensor greater_equal(const Tensor& x, const Tensor& y) { return at::ge(x, y); }
Tensor less(const Tensor& x, const Tensor& y) { return at::lt(x, y); }
Tensor less_equal(const Tensor& x, const Tensor& y) { return at::le(x, y); }
Tensor bitwise_and(const Tensor& x, const Tensor& y) { return at::bitwise_and(x, y); }
Tensor bitwise_or(const Tensor& x, const Tensor& y) { return at::bitwise_or(x, y); }
Tensor bitwise_xor(const Tensor& x, const Tensor& y) { return at::bitwise_xor(x, y); }

const bool comparison =
    legacy("Equal", two<equal>) && legacy("NotEqual", two<not_equal>) &&
    legacy("Greater", two<greater>) && legacy("GreaterEqual", two<greater_equal>) &&
    legacy("Less", two<less>) && legacy("LessEqual", two<less_equal>) &&
    legacy("LogicalAnd", two<at::logical_and>) && legacy("LogicalOr", two<at::logical_or>) &&
    legacy("BitwiseAnd", two<bitwise_and>) && legacy("BitwiseOr", two<bitwise_or>) &&
    legacy("BitwiseXor", two<bitwise_xor>);
VNPU_LEGACY(tensor_equal, "TensorEqual", at::scalar_tensor(at::equal(a[0], a[1]), at::kBool));
VNPU_LEGACY(is_close, "IsClose",
            at::isclose(a[0], a[1], a.real("rtol", 1e-5), a.real("atol", 1e-8),
                        a.flag("equal_nan")));
VNPU_LEGACY(select, "Select SelectV2", at::where(a[0].to(at::kBool), a[1], a[2]));
VNPU_LEGACY(masked_fill, "MaskedFill",
            at::where(a[1].to(at::kBool), a[2].reshape({}).to(a[0].scalar_type()), a[0]));

// --- activations ---------------------------------------------------------------------------------

const bool activations = legacy("Relu", one<at::relu>) && legacy("Sigmoid", one<at::sigmoid>) &&
                         legacy("HardSwish", one<at::hardswish>) &&
                         legacy("HardSigmoid", one<at::hardsigmoid>) &&
                         legacy("Mish", one<at::mish>) && legacy("Selu", one<at::selu>) &&
                         legacy("LogSigmoid", one<at::log_sigmoid>);
// The formula with tanh. Source: ops-nn activation/gelu/README.md
VNPU_LEGACY(gelu, "Gelu", at::gelu(a[0], "tanh"));
const bool swish = legacy("Swish", [](const LegacyArguments& a) -> Results {
  const double scale = a.real("scale", 1);
  if (scale == 1) return {at::silu(a[0])};
  const Tensor x = widen(a[0]);
  return {x * at::sigmoid(x * scale)};
});
VNPU_LEGACY(softplus, "SoftplusV2", at::softplus(a[0], a.real("beta", 1), a.real("threshold", 20)));
VNPU_LEGACY(leaky_relu, "LeakyRelu", at::leaky_relu(a[0], a.real("negative_slope", 0)));
VNPU_LEGACY(elu, "Elu",
            at::elu(a[0], a.real("alpha", 1), a.real("scale", 1), a.real("input_scale", 1)));
VNPU_LEGACY(celu, "CeluV2", at::celu(a[0], a.real("alpha", 1)));
VNPU_LEGACY(glu, "GLU", at::glu(a[0], a.integer("dim", -1)));
VNPU_LEGACY(prelu, "PRelu", at::where(a[0].gt(0), a[0], a[0] * a[1]));

}  // namespace
}  // namespace vnpu::ops
