// The same operation on each tensor of a list. `out` may be the list itself. What is rounded where
// follows the kernels of ops-nn v8.5.0, foreach/*/op_kernel.

#include "ops/operator.h"

namespace vnpu::ops {
namespace {

// Numbers reach the kernels of float16 in float16, those of the other floats in float32.
Scalar rounded(const Scalar& number, const TensorList& list) {
  if (list.empty() || list[0].scalar_type() != at::kHalf) return number;
  return static_cast<float>(static_cast<at::Half>(number.to<float>()));
}

template <class Compute>
void each(const OutList& out, const Compute& compute) {
  for (size_t i = 0; i < out.size(); ++i) store(out[i], compute(i));
}

// Kernels of bfloat16 compute in float32, those of float16 in float16.
Tensor wide(const Tensor& x) { return x.scalar_type() == at::kBFloat16 ? x.to(at::kFloat) : x; }

// Half of an addcmul or addcdiv.
Tensor term(const Tensor& x2, const Tensor& x3, Tensor (*combine)(const Tensor&, const Tensor&)) {
  return combine(wide(x2), wide(x3));
}

Tensor product(const Tensor& x, const Tensor& y) { return at::mul(x, y); }
Tensor quotient(const Tensor& x, const Tensor& y) { return at::div(x, y); }

const Tensor& itself(const Tensor& x) { return x; }

Tensor rounded_to_integers(const Tensor& x, int64_t mode) {
  switch (mode) {
    case 1: return at::round(x);
    case 2: return at::floor(x);
    case 3: return at::ceil(x);
    case 4: return at::sign(x) * at::floor(at::abs(widen(x)) + 0.5);
    case 5: return at::trunc(x);
    case 7: return at::frac(x);
    default:
      refuse("roundMode is " + std::to_string(mode) +
             "; 1 (to even), 2 (down), 3 (up), 4 (away from zero), 5 (towards zero) and 7 (what is "
             "behind the point) are implemented.");
  }
}

}  // namespace

// --- one list ------------------------------------------------------------------------------------

#define VNPU_FOREACH(NAME, FUNCTION)                                        \
  VNPU_OPERATOR(Foreach##NAME, (const TensorList& x, const OutList& out)) { \
    each(out, [&](size_t i) { return FUNCTION(x[i]); });                    \
  }

VNPU_FOREACH(Abs, at::abs)
VNPU_FOREACH(Acos, at::acos)
VNPU_FOREACH(Asin, at::asin)
VNPU_FOREACH(Atan, at::atan)
VNPU_FOREACH(Copy, itself)
VNPU_FOREACH(Cos, at::cos)
VNPU_FOREACH(Cosh, at::cosh)
VNPU_FOREACH(Erf, at::erf)
VNPU_FOREACH(Erfc, at::erfc)
VNPU_FOREACH(Exp, at::exp)
VNPU_FOREACH(Expm1, at::expm1)
VNPU_FOREACH(Log, at::log)
VNPU_FOREACH(Log10, at::log10)
VNPU_FOREACH(Log1p, at::log1p)
VNPU_FOREACH(Log2, at::log2)
VNPU_FOREACH(Neg, at::neg)
VNPU_FOREACH(Reciprocal, at::reciprocal)
VNPU_FOREACH(Sigmoid, at::sigmoid)
VNPU_FOREACH(Sign, at::sign)
VNPU_FOREACH(Sin, at::sin)
VNPU_FOREACH(Sinh, at::sinh)
VNPU_FOREACH(Sqrt, at::sqrt)
VNPU_FOREACH(Tan, at::tan)
VNPU_FOREACH(Tanh, at::tanh)

VNPU_OPERATOR(ForeachZeroInplace, (const InOutList& x)) {
  for (Tensor tensor : x) tensor.zero_();
}
VNPU_OPERATOR(ForeachRoundOffNumberV2,
              (const TensorList& x, const Scalar& round_mode, const OutList& out)) {
  each(out, [&](size_t i) { return rounded_to_integers(x[i], round_mode.toLong()); });
}
VNPU_OPERATOR(ForeachNorm, (const TensorList& x, const Scalar& scalar, const OutList& out)) {
  each(out, [&](size_t i) { return at::linalg_vector_norm(widen(x[i]), scalar); });
}

// --- a list and numbers --------------------------------------------------------------------------

// FUNCTION(tensor, scalar)
#define VNPU_FOREACH_NUMBER(NAME, FUNCTION)                                             \
  VNPU_OPERATOR(Foreach##NAME##ScalarV2,                                                \
                (const TensorList& x, const Scalar& scalar, const OutList& out)) {      \
    each(out, [&](size_t i) { return FUNCTION(x[i], rounded(scalar, x)); });            \
  }                                                                                     \
  VNPU_OPERATOR(Foreach##NAME##ScalarList,                                              \
                (const TensorList& x, const ScalarList& scalars, const OutList& out)) { \
    each(out, [&](size_t i) { return FUNCTION(x[i], rounded(scalars[i], x)); });        \
  }

VNPU_FOREACH_NUMBER(Add, at::add)
VNPU_FOREACH_NUMBER(Sub, at::sub)
VNPU_FOREACH_NUMBER(Mul, at::mul)
VNPU_FOREACH_NUMBER(Div, at::div)
VNPU_FOREACH_NUMBER(Maximum, at::clamp_min)
VNPU_FOREACH_NUMBER(Minimum, at::clamp_max)
VNPU_FOREACH_NUMBER(Pow, at::pow)

VNPU_OPERATOR(ForeachPowScalarAndTensor,
              (const Scalar& scalar, const TensorList& x, const OutList& out)) {
  each(out, [&](size_t i) { return at::pow(scalar, x[i]); });
}

// --- two lists -----------------------------------------------------------------------------------

#define VNPU_FOREACH_PAIR(NAME, FUNCTION)                                           \
  VNPU_OPERATOR(Foreach##NAME##List,                                                \
                (const TensorList& x1, const TensorList& x2, const OutList& out)) { \
    each(out, [&](size_t i) { return FUNCTION(x1[i], x2[i]); });                    \
  }

VNPU_FOREACH_PAIR(Mul, at::mul)
VNPU_FOREACH_PAIR(Div, at::div)
VNPU_FOREACH_PAIR(Maximum, at::maximum)
VNPU_FOREACH_PAIR(Minimum, at::minimum)
VNPU_FOREACH_PAIR(Pow, at::pow)

// bfloat16 is rounded once; of a difference of float16 also what is scaled.
VNPU_OPERATOR(ForeachAddListV2, (const TensorList& x1, const TensorList& x2, const Scalar& alpha,
                                 const OutList& out)) {
  each(out, [&](size_t i) { return at::add(wide(x1[i]), wide(x2[i]), rounded(alpha, x1)); });
}
VNPU_OPERATOR(ForeachSubListV2, (const TensorList& x1, const TensorList& x2, const Scalar& alpha,
                                 const OutList& out)) {
  each(out, [&](size_t i) {
    const Scalar factor = rounded(alpha, x1);
    if (x1[i].scalar_type() == at::kHalf) return at::sub(x1[i], at::mul(x2[i], factor));
    return at::sub(wide(x1[i]), wide(x2[i]), factor);
  });
}
VNPU_OPERATOR(ForeachLerpScalar, (const TensorList& x1, const TensorList& x2, const Scalar& weight,
                                  const OutList& out)) {
  each(out, [&](size_t i) { return at::lerp(x1[i], x2[i], weight); });
}
VNPU_OPERATOR(ForeachLerpList, (const TensorList& x1, const TensorList& x2,
                                const TensorList& weight, const OutList& out)) {
  each(out, [&](size_t i) { return at::lerp(x1[i], x2[i], weight[i]); });
}

// --- three lists ---------------------------------------------------------------------------------

// ScalarList and List have their numbers in one tensor on the device.
#define VNPU_FOREACH_TERM(NAME, COMBINE)                                           \
  VNPU_OPERATOR(Foreach##NAME##ScalarV2,                                           \
                (const TensorList& x1, const TensorList& x2, const TensorList& x3, \
                 const Scalar& scalar, const OutList& out)) {                      \
    each(out, [&](size_t i) {                                                      \
      return at::add(x1[i], term(x2[i], x3[i], COMBINE), rounded(scalar, x1));     \
    });                                                                            \
  }                                                                                \
  VNPU_OPERATOR(Foreach##NAME##ScalarList,                                         \
                (const TensorList& x1, const TensorList& x2, const TensorList& x3, \
                 const Tensor& scalars, const OutList& out)) {                     \
    const Tensor numbers = scalars.reshape(-1);                                    \
    each(out, [&](size_t i) {                                                      \
      const Scalar scalar = numbers[static_cast<int64_t>(i)].item();               \
      return at::add(x1[i], term(x2[i], x3[i], COMBINE), scalar);                  \
    });                                                                            \
  }

VNPU_FOREACH_TERM(Addcmul, product)
VNPU_FOREACH_TERM(Addcdiv, quotient)

}  // namespace vnpu::ops
