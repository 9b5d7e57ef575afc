// Element-wise arithmetic of two or three operands, but division (division.cpp): tensor-tensor,
// tensor-scalar and in-place forms. Each computes in the promoted dtype of its inputs and casts on
// writing, as ATen's iterator does.

#include "ops/pointwise/rows.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

// The kernels of float16 round after each step, and take `value` in float16; those of bfloat16
// compute in float32. Source: ops-math experimental/math/addc{mul,div}/op_kernel.
Tensor scaled_term(const Tensor& self, const Tensor& term, const Scalar& value) {
  return at::add(self, at::mul(term, static_cast<float>(static_cast<at::Half>(value.to<float>()))));
}
bool is_half(const Tensor& self, const Tensor& tensor1, const Tensor& tensor2) {
  return self.scalar_type() == at::kHalf && tensor1.scalar_type() == at::kHalf &&
         tensor2.scalar_type() == at::kHalf;
}

}  // namespace

// --- sums and differences ---------------------------------------------------------------------

VNPU_SUM_TENSOR(Add, at::add_out, {.cost = elements<1>, .rules = rules_of_add()})

static Rules rules_of_adds() {
  return {kArithmetic,
          {{"self", dtype(kNumbers), kOnBigChips},
           {"out", same_sizes("self"), "OP_CHECK_SHAPE_NOT_EQUAL in aclnn_{add,sub,mul}.cpp"}}};
}
VNPU_SUM_SCALAR(Adds, at::add_out, {.cost = elements<1>, .rules = rules_of_adds()})
VNPU_OPERATOR(AddV3, (const Scalar& self, const Tensor& other, const Scalar& alpha, Out out),
              {.cost = elements<1>}) {
  at::add_out(out.tensor, number(self), other, alpha);
}
VNPU_OPERATOR(InplaceAdd, (InOut self, const Tensor& other, const Scalar& alpha),
              {.cost = elements<1>, .rules = rules_of_add()}) {
  self.tensor.add_(other, alpha);
}
VNPU_OPERATOR(InplaceAdds, (InOut self, const Scalar& other, const Scalar& alpha),
              {.cost = elements<1>, .rules = rules_of_divs()}) {
  self.tensor.add_(number(other), alpha);
}
VNPU_SUM_TENSOR(Sub, at::sub_out, {.cost = elements<1>, .rules = rules_of_add()})
VNPU_SUM_SCALAR(Subs, at::sub_out, {.cost = elements<1>, .rules = rules_of_adds()})
VNPU_OPERATOR(InplaceSub, (InOut self, const Tensor& other, const Scalar& alpha),
              {.cost = elements<1>, .rules = rules_of_add()}) {
  self.tensor.sub_(other, alpha);
}
VNPU_OPERATOR(InplaceSubs, (InOut self, const Scalar& other, const Scalar& alpha),
              {.cost = elements<1>, .rules = rules_of_divs()}) {
  self.tensor.sub_(number(other), alpha);
}
VNPU_OPERATOR(Rsub, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out),
              {.cost = elements<1>}) {
  at::sub_out(out.tensor, other, self, alpha);
}
VNPU_OPERATOR(Rsubs, (const Tensor& self, const Scalar& other, const Scalar& alpha, Out out),
              {.cost = elements<1>,
               .rules = {
                   "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_rsub.cpp",
                   {{"self", dtype(kRealAndComplex), kOnBigChips}, {"out", same_sizes("self")}}}}) {
  at::sub_out(out.tensor, number(other), self, alpha);
}

// --- products ---------------------------------------------------------------------------------

VNPU_TENSOR_TENSOR(Mul, at::mul_out, {.cost = elements<1>, .rules = rules_of_add()})
VNPU_TENSOR_SCALAR(Muls, at::mul_out, {.cost = elements<1>, .rules = rules_of_adds()})
VNPU_INPLACE_TENSOR(InplaceMul, at::mul_out, {.cost = elements<1>, .rules = rules_of_add()})
VNPU_INPLACE_SCALAR(InplaceMuls, at::mul_out, {.cost = elements<1>, .rules = rules_of_divs()})

// --- powers -----------------------------------------------------------------------------------

VNPU_OPERATOR(PowTensorTensor, (const Tensor& self, const Tensor& exponent, Out out),
              {.cost = elements<10>}) {
  at::pow_out(out.tensor, self, exponent);
}

constexpr char kPow[] = "DTYPE_SUPPORT_LIST, CheckShape in aclnn_pow.cpp";
VNPU_OPERATOR(PowTensorScalar, (const Tensor& self, const Scalar& exponent, Out out),
              {.cost = elements<10>,
               .rules = {kPow,
                         {{"self", dtype(kNumbers), kOnBigChips}, {"out", same_sizes("self")}}}}) {
  at::pow_out(out.tensor, self, exponent);
}
VNPU_OPERATOR(PowScalarTensor, (const Scalar& self, const Tensor& exponent, Out out),
              {.cost = elements<10>,
               .rules = {kPow,
                         {{"exponent", dtype(kNumbers), kOnBigChips},
                          {"out", same_sizes("exponent")}}}}) {
  at::pow_out(out.tensor, self, exponent);
}
VNPU_OPERATOR(InplacePowTensorTensor, (InOut self, const Tensor& exponent),
              {.cost = elements<10>}) {
  self.tensor.pow_(exponent);
}
VNPU_OPERATOR(InplacePowTensorScalar, (InOut self, const Scalar& exponent),
              {.cost = elements<10>}) {
  self.tensor.pow_(exponent);
}

// --- selection and fused forms ----------------------------------------------------------------

// NaN in either operand gives NaN.
VNPU_TENSOR_TENSOR(Maximum, at::maximum_out, {.cost = elements<1>})
VNPU_TENSOR_TENSOR(Minimum, at::minimum_out, {.cost = elements<1>})
VNPU_TENSOR_TENSOR(Atan2, at::atan2_out, {.cost = elements<10>})

static Rules rules_of_inplace_addcmul() {
  const std::vector<ScalarType> dtypes =
      with(kFloats, {at::kDouble, at::kInt, at::kLong, at::kChar, at::kByte});
  return {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_addcmul.cpp",
          {{"self, tensor1, tensor2", dtype(dtypes), kOnBigChips}}};
}
#define VNPU_SCALED_TERM(NAME, FUNCTION, TERM, ...)                                              \
  VNPU_OPERATOR(NAME,                                                                            \
                (const Tensor& self, const Tensor& tensor1, const Tensor& tensor2,               \
                 const Scalar& value, Out out),                                                  \
                __VA_ARGS__) {                                                                   \
    if (is_half(self, tensor1, tensor2)) {                                                       \
      store(out, scaled_term(self, TERM(tensor1, tensor2), value));                              \
    } else {                                                                                     \
      FUNCTION(out.tensor, self, tensor1, tensor2, value);                                       \
    }                                                                                            \
  }                                                                                              \
  VNPU_OPERATOR(Inplace##NAME,                                                                   \
                (InOut self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value), \
                __VA_ARGS__) {                                                                   \
    if (is_half(self.tensor, tensor1, tensor2)) {                                                \
      store(self, scaled_term(self.tensor, TERM(tensor1, tensor2), value));                      \
    } else {                                                                                     \
      FUNCTION(self.tensor, self.tensor, tensor1, tensor2, value);                               \
    }                                                                                            \
  }
VNPU_SCALED_TERM(Addcmul, at::addcmul_out, at::mul,
                 {.cost = elements<1>, .rules = rules_of_inplace_addcmul()})
VNPU_SCALED_TERM(Addcdiv, at::addcdiv_out, at::div, {.cost = elements<1>})
VNPU_OPERATOR(Lerp, (const Tensor& self, const Tensor& end, const Tensor& weight, Out out),
              {.cost = elements<1>}) {
  at::lerp_out(out.tensor, self, end, weight);
}
VNPU_OPERATOR(Lerps, (const Tensor& self, const Tensor& end, const Scalar& weight, Out out),
              {.cost = elements<1>}) {
  at::lerp_out(out.tensor, self, end, weight);
}

VNPU_OPERATOR(LogAddExp, (const Tensor& self, const Tensor& other, Out out),
              {.tier = kOther, .cost = elements<10>}) {
  store(out, at::logaddexp(widen(self), widen(other)));
}

}  // namespace vnpu::ops
