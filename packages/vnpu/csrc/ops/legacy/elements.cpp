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

// --- arithmetic ----------------------------------------------------------------------------------

Tensor add(const Tensor& x, const Tensor& y) { return at::add(x, y); }
Tensor sub(const Tensor& x, const Tensor& y) { return at::sub(x, y); }
Tensor mul(const Tensor& x, const Tensor& y) { return at::mul(x, y); }
Tensor div(const Tensor& x, const Tensor& y) { return at::div(x, y); }

const bool arithmetic = legacy("Add", two<add>) && legacy("Sub", two<sub>) &&
                        legacy("Mul", two<mul>) && legacy("RealDiv Div", two<div>) &&
                        legacy("Neg", one<at::neg>) && legacy("Abs", one<at::abs>);

// 16-bit floats are rounded once.
VNPU_LEGACY(axpy, "AxpyV2", widen(a[0]) + widen(a[1]) * widen(a[2]));

// --- comparison ----------------------------------------------------------------------------------

Tensor equal(const Tensor& x, const Tensor& y) { return at::eq(x, y); }
Tensor not_equal(const Tensor& x, const Tensor& y) { return at::ne(x, y); }
Tensor greater(const Tensor& x, const Tensor& y) { return at::gt(x, y); }
Tensor greater_equal(const Tensor& x, const Tensor& y) { return at::ge(x, y); }
Tensor less(const Tensor& x, const Tensor& y) { return at::lt(x, y); }
Tensor less_equal(const Tensor& x, const Tensor& y) { return at::le(x, y); }

const bool comparison =
    legacy("Equal", two<equal>) && legacy("NotEqual", two<not_equal>) &&
    legacy("Greater", two<greater>) && legacy("GreaterEqual", two<greater_equal>) &&
    legacy("Less", two<less>) && legacy("LessEqual", two<less_equal>) &&
    legacy("LogicalNot", one<at::logical_not>) && legacy("LogicalAnd", two<at::logical_and>) &&
    legacy("IsFinite", one<at::isfinite>);
VNPU_LEGACY(tensor_equal, "TensorEqual", at::scalar_tensor(at::equal(a[0], a[1]), at::kBool));
VNPU_LEGACY(is_close, "IsClose",
            at::isclose(a[0], a[1], a.real("rtol", 1e-5), a.real("atol", 1e-8),
                        a.flag("equal_nan")));

}  // namespace
}  // namespace vnpu::ops
