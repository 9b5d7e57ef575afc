// The same operation on each tensor of a list. `out` may be the list itself. What is rounded where
// follows the kernels of ops-nn v8.5.0, foreach/*/op_kernel.

#include "ops/operator.h"
#include "ops/pointwise/declarations.h"

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

#define VNPU_FOREACH(NAME, FUNCTION, ...)                                                \
  VNPU_OPERATOR(Foreach##NAME, (const TensorList& x, const OutList& out), __VA_ARGS__) { \
    each(out, [&](size_t i) { return FUNCTION(x[i]); });                                 \
  }

VNPU_FOREACH(Abs, at::abs, {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Acos, at::acos, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Asin, at::asin, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Atan, at::atan, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Copy, itself, {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_copy})
VNPU_FOREACH(Cos, at::cos, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Cosh, at::cosh, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Erf, at::erf, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Erfc, at::erfc, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Exp, at::exp, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Expm1, at::expm1, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Log, at::log, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Log10, at::log10, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Log1p, at::log1p, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Log2, at::log2, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Neg, at::neg, {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_neg})
VNPU_FOREACH(Reciprocal, at::reciprocal,
             {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Sigmoid, at::sigmoid, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Sign, at::sign, {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_sign})
VNPU_FOREACH(Sin, at::sin, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Sinh, at::sinh, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Sqrt, at::sqrt, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Tan, at::tan, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})
VNPU_FOREACH(Tanh, at::tanh, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_abs})

VNPU_OPERATOR(ForeachZeroInplace, (const InOutList& x),
              {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_zero_inplace}) {
  for (Tensor tensor : x) tensor.zero_();
}
VNPU_OPERATOR(ForeachRoundOffNumberV2,
              (const TensorList& x, const Scalar& round_mode, const OutList& out),
              {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_round_off_number_v2}) {
  each(out, [&](size_t i) { return rounded_to_integers(x[i], round_mode.toLong()); });
}
VNPU_OPERATOR(ForeachNorm, (const TensorList& x, const Scalar& scalar, const OutList& out),
              {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_norm}) {
  each(out, [&](size_t i) { return at::linalg_vector_norm(widen(x[i]), scalar); });
}

// --- a list and numbers --------------------------------------------------------------------------

// FUNCTION(tensor, scalar)
#define VNPU_FOREACH_SCALAR(NAME, FUNCTION, ...)                                                \
  VNPU_OPERATOR(Foreach##NAME##ScalarV2,                                                        \
                (const TensorList& x, const Scalar& scalar, const OutList& out), __VA_ARGS__) { \
    each(out, [&](size_t i) { return FUNCTION(x[i], rounded(scalar, x)); });                    \
  }
#define VNPU_FOREACH_SCALARS(NAME, FUNCTION, ...)                                     \
  VNPU_OPERATOR(Foreach##NAME##ScalarList,                                            \
                (const TensorList& x, const ScalarList& scalars, const OutList& out), \
                __VA_ARGS__) {                                                        \
    each(out, [&](size_t i) { return FUNCTION(x[i], rounded(scalars[i], x)); });      \
  }

VNPU_FOREACH_SCALAR(Add, at::add,
                    {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_v2})
VNPU_FOREACH_SCALARS(Add, at::add,
                     {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_list})
VNPU_FOREACH_SCALAR(Sub, at::sub,
                    {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_v2})
VNPU_FOREACH_SCALARS(Sub, at::sub,
                     {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_list})
VNPU_FOREACH_SCALAR(Mul, at::mul,
                    {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_v2})
VNPU_FOREACH_SCALARS(Mul, at::mul,
                     {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_list})
VNPU_FOREACH_SCALAR(Div, at::div,
                    {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_div_scalar_v2})
VNPU_FOREACH_SCALARS(Div, at::div,
                     {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_div_scalar_list})
VNPU_FOREACH_SCALAR(Maximum, at::clamp_min,
                    {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_v2})
VNPU_FOREACH_SCALARS(Maximum, at::clamp_min,
                     {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_list})
VNPU_FOREACH_SCALAR(Minimum, at::clamp_max,
                    {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_v2})
VNPU_FOREACH_SCALARS(Minimum, at::clamp_max,
                     {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_scalar_list})
VNPU_FOREACH_SCALAR(Pow, at::pow,
                    {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_add_scalar_v2})
VNPU_FOREACH_SCALARS(Pow, at::pow,
                     {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_add_scalar_list})

VNPU_OPERATOR(ForeachPowScalarAndTensor,
              (const Scalar& scalar, const TensorList& x, const OutList& out),
              {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_pow_scalar_and_tensor}) {
  each(out, [&](size_t i) { return at::pow(scalar, x[i]); });
}

// --- two lists -----------------------------------------------------------------------------------

#define VNPU_FOREACH_PAIR(NAME, FUNCTION, ...)                                                   \
  VNPU_OPERATOR(Foreach##NAME##List,                                                             \
                (const TensorList& x1, const TensorList& x2, const OutList& out), __VA_ARGS__) { \
    each(out, [&](size_t i) { return FUNCTION(x1[i], x2[i]); });                                 \
  }

VNPU_FOREACH_PAIR(Mul, at::mul, {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_mul_list})
VNPU_FOREACH_PAIR(Div, at::div, {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_div_list})
VNPU_FOREACH_PAIR(Maximum, at::maximum,
                  {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_mul_list})
VNPU_FOREACH_PAIR(Minimum, at::minimum,
                  {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_mul_list})
VNPU_FOREACH_PAIR(Pow, at::pow, {.cost = cost_of_foreach_acos, .allowed = allowed_foreach_mul_list})

// bfloat16 is rounded once; of a difference of float16 also what is scaled.
VNPU_OPERATOR(ForeachAddListV2,
              (const TensorList& x1, const TensorList& x2, const Scalar& alpha, const OutList& out),
              {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_list_v2}) {
  each(out, [&](size_t i) { return at::add(wide(x1[i]), wide(x2[i]), rounded(alpha, x1)); });
}
VNPU_OPERATOR(ForeachSubListV2,
              (const TensorList& x1, const TensorList& x2, const Scalar& alpha, const OutList& out),
              {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_add_list_v2}) {
  each(out, [&](size_t i) {
    const Scalar factor = rounded(alpha, x1);
    if (x1[i].scalar_type() == at::kHalf) return at::sub(x1[i], at::mul(x2[i], factor));
    return at::sub(wide(x1[i]), wide(x2[i]), factor);
  });
}
VNPU_OPERATOR(ForeachLerpScalar,
              (const TensorList& x1, const TensorList& x2, const Scalar& weight,
               const OutList& out),
              {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_lerp_scalar}) {
  each(out, [&](size_t i) { return at::lerp(x1[i], x2[i], weight); });
}
VNPU_OPERATOR(ForeachLerpList,
              (const TensorList& x1, const TensorList& x2, const TensorList& weight,
               const OutList& out),
              {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_lerp_list}) {
  each(out, [&](size_t i) { return at::lerp(x1[i], x2[i], weight[i]); });
}

// --- three lists ---------------------------------------------------------------------------------

// ScalarList and List have their numbers in one tensor on the device.
#define VNPU_FOREACH_TERM(NAME, COMBINE, ...)                                      \
  VNPU_OPERATOR(Foreach##NAME##ScalarV2,                                           \
                (const TensorList& x1, const TensorList& x2, const TensorList& x3, \
                 const Scalar& scalar, const OutList& out),                        \
                __VA_ARGS__) {                                                     \
    each(out, [&](size_t i) {                                                      \
      return at::add(x1[i], term(x2[i], x3[i], COMBINE), rounded(scalar, x1));     \
    });                                                                            \
  }
#define VNPU_FOREACH_TERMS(NAME, COMBINE, ...)                                     \
  VNPU_OPERATOR(Foreach##NAME##ScalarList,                                         \
                (const TensorList& x1, const TensorList& x2, const TensorList& x3, \
                 const Tensor& scalars, const OutList& out),                       \
                __VA_ARGS__) {                                                     \
    const Tensor numbers = scalars.reshape(-1);                                    \
    each(out, [&](size_t i) {                                                      \
      const Scalar scalar = numbers[static_cast<int64_t>(i)].item();               \
      return at::add(x1[i], term(x2[i], x3[i], COMBINE), scalar);                  \
    });                                                                            \
  }

VNPU_FOREACH_TERM(Addcmul, product,
                  {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_addcmul_scalar_v2})
VNPU_FOREACH_TERMS(Addcmul, product,
                   {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_addcmul_scalar_list})
VNPU_FOREACH_TERM(Addcdiv, quotient,
                  {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_addcdiv_scalar_v2})
VNPU_FOREACH_TERMS(Addcdiv, quotient,
                   {.cost = cost_of_foreach_abs, .allowed = allowed_foreach_addcdiv_scalar_list})

}  // namespace vnpu::ops
