// Element-wise arithmetic of two or three operands, but division (division.cpp): tensor-tensor,
// tensor-scalar and in-place forms. Each computes in the promoted dtype of its inputs and casts on
// writing, as ATen's iterator does.

#include "ops/operator.h"
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

VNPU_OPERATOR(Add, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_add()}) {
  at::add_out(out.tensor, self, other, alpha);
}

static Rules rules_of_adds() {
  return {kArithmetic,
          {{"self", dtype(kNumbers), kOnBigChips},
           {"out", same_sizes("self"), "OP_CHECK_SHAPE_NOT_EQUAL in aclnn_{add,sub,mul}.cpp"}}};
}
VNPU_OPERATOR(Adds, (const Tensor& self, const Scalar& other, const Scalar& alpha, Out out),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_adds()}) {
  at::add_out(out.tensor, self, number(other), alpha);
}
VNPU_OPERATOR(AddV3, (const Scalar& self, const Tensor& other, const Scalar& alpha, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::add_out(out.tensor, number(self), other, alpha);
}
VNPU_OPERATOR(InplaceAdd, (InOut self, const Tensor& other, const Scalar& alpha),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_add()}) {
  self.tensor.add_(other, alpha);
}
VNPU_OPERATOR(InplaceAdds, (InOut self, const Scalar& other, const Scalar& alpha),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_divs()}) {
  self.tensor.add_(number(other), alpha);
}
VNPU_OPERATOR(Sub, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_add()}) {
  at::sub_out(out.tensor, self, other, alpha);
}
VNPU_OPERATOR(Subs, (const Tensor& self, const Scalar& other, const Scalar& alpha, Out out),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_adds()}) {
  at::sub_out(out.tensor, self, number(other), alpha);
}
VNPU_OPERATOR(InplaceSub, (InOut self, const Tensor& other, const Scalar& alpha),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_add()}) {
  self.tensor.sub_(other, alpha);
}
VNPU_OPERATOR(InplaceSubs, (InOut self, const Scalar& other, const Scalar& alpha),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_divs()}) {
  self.tensor.sub_(number(other), alpha);
}
VNPU_OPERATOR(Rsub, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::sub_out(out.tensor, other, self, alpha);
}
VNPU_OPERATOR(Rsubs, (const Tensor& self, const Scalar& other, const Scalar& alpha, Out out),
              {.tier = kT1,
               .cost = elements<1>,
               .rules = {
                   "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_rsub.cpp",
                   {{"self", dtype(kRealAndComplex), kOnBigChips}, {"out", same_sizes("self")}}}}) {
  at::sub_out(out.tensor, number(other), self, alpha);
}

// --- products ---------------------------------------------------------------------------------

VNPU_OPERATOR(Mul, (const Tensor& self, const Tensor& other, Out out),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_add()}) {
  at::mul_out(out.tensor, self, other);
}
VNPU_OPERATOR(Muls, (const Tensor& self, const Scalar& other, Out out),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_adds()}) {
  at::mul_out(out.tensor, self, number(other));
}
VNPU_OPERATOR(InplaceMul, (InOut self, const Tensor& other),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_add()}) {
  self.tensor.mul_(other);
}
VNPU_OPERATOR(InplaceMuls, (InOut self, const Scalar& other),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_divs()}) {
  self.tensor.mul_(number(other));
}

// --- powers -----------------------------------------------------------------------------------

VNPU_OPERATOR(PowTensorTensor, (const Tensor& self, const Tensor& exponent, Out out),
              {.tier = kT1, .cost = elements<10>}) {
  at::pow_out(out.tensor, self, exponent);
}

constexpr char kPow[] = "DTYPE_SUPPORT_LIST, CheckShape in aclnn_pow.cpp";
VNPU_OPERATOR(PowTensorScalar, (const Tensor& self, const Scalar& exponent, Out out),
              {.tier = kT1,
               .cost = elements<10>,
               .rules = {kPow,
                         {{"self", dtype(kNumbers), kOnBigChips}, {"out", same_sizes("self")}}}}) {
  at::pow_out(out.tensor, self, exponent);
}
VNPU_OPERATOR(PowScalarTensor, (const Scalar& self, const Tensor& exponent, Out out),
              {.tier = kT1,
               .cost = elements<10>,
               .rules = {kPow,
                         {{"exponent", dtype(kNumbers), kOnBigChips},
                          {"out", same_sizes("exponent")}}}}) {
  at::pow_out(out.tensor, self, exponent);
}
VNPU_OPERATOR(InplacePowTensorTensor, (InOut self, const Tensor& exponent),
              {.tier = kT1, .cost = elements<10>}) {
  self.tensor.pow_(exponent);
}
VNPU_OPERATOR(InplacePowTensorScalar, (InOut self, const Scalar& exponent),
              {.tier = kT1, .cost = elements<10>}) {
  self.tensor.pow_(exponent);
}

// --- selection and fused forms ----------------------------------------------------------------

// NaN in either operand gives NaN.
VNPU_OPERATOR(Maximum, (const Tensor& self, const Tensor& other, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::maximum_out(out.tensor, self, other);
}
VNPU_OPERATOR(Minimum, (const Tensor& self, const Tensor& other, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::minimum_out(out.tensor, self, other);
}
VNPU_OPERATOR(Atan2, (const Tensor& self, const Tensor& other, Out out),
              {.tier = kT1, .cost = elements<10>}) {
  at::atan2_out(out.tensor, self, other);
}
VNPU_OPERATOR(InplaceAtan2, (InOut self, const Tensor& other), {.cost = elements<10>}) {
  self.tensor.atan2_(other);
}

static Rules rules_of_inplace_addcmul() {
  const std::vector<ScalarType> dtypes =
      with(kFloats, {at::kDouble, at::kInt, at::kLong, at::kChar, at::kByte});
  return {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_addcmul.cpp",
          {{"self, tensor1, tensor2", dtype(dtypes), kOnBigChips}}};
}
VNPU_OPERATOR(Addcmul,
              (const Tensor& self, const Tensor& tensor1, const Tensor& tensor2,
               const Scalar& value, Out out),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_inplace_addcmul()}) {
  if (is_half(self, tensor1, tensor2)) {
    store(out, scaled_term(self, at::mul(tensor1, tensor2), value));
  } else {
    at::addcmul_out(out.tensor, self, tensor1, tensor2, value);
  }
}
VNPU_OPERATOR(InplaceAddcmul,
              (InOut self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value),
              {.tier = kT1, .cost = elements<1>, .rules = rules_of_inplace_addcmul()}) {
  if (is_half(self.tensor, tensor1, tensor2)) {
    store(self, scaled_term(self.tensor, at::mul(tensor1, tensor2), value));
  } else {
    self.tensor.addcmul_(tensor1, tensor2, value);
  }
}
VNPU_OPERATOR(Addcdiv,
              (const Tensor& self, const Tensor& tensor1, const Tensor& tensor2,
               const Scalar& value, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  if (is_half(self, tensor1, tensor2)) {
    store(out, scaled_term(self, at::div(tensor1, tensor2), value));
  } else {
    at::addcdiv_out(out.tensor, self, tensor1, tensor2, value);
  }
}
VNPU_OPERATOR(InplaceAddcdiv,
              (InOut self, const Tensor& tensor1, const Tensor& tensor2, const Scalar& value),
              {.tier = kT1, .cost = elements<1>}) {
  if (is_half(self.tensor, tensor1, tensor2)) {
    store(self, scaled_term(self.tensor, at::div(tensor1, tensor2), value));
  } else {
    self.tensor.addcdiv_(tensor1, tensor2, value);
  }
}
VNPU_OPERATOR(Lerp, (const Tensor& self, const Tensor& end, const Tensor& weight, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::lerp_out(out.tensor, self, end, weight);
}
VNPU_OPERATOR(Lerps, (const Tensor& self, const Tensor& end, const Scalar& weight, Out out),
              {.tier = kT1, .cost = elements<1>}) {
  at::lerp_out(out.tensor, self, end, weight);
}
VNPU_OPERATOR(InplaceLerp, (InOut self, const Tensor& end, const Tensor& weight),
              {.cost = elements<1>}) {
  self.tensor.lerp_(end, weight);
}
VNPU_OPERATOR(InplaceLerps, (InOut self, const Tensor& end, const Scalar& weight),
              {.cost = elements<1>}) {
  self.tensor.lerp_(end, weight);
}

VNPU_OPERATOR(LogAddExp, (const Tensor& self, const Tensor& other, Out out),
              {.cost = elements<10>}) {
  store(out, at::logaddexp(widen(self), widen(other)));
}
VNPU_OPERATOR(LogAddExp2, (const Tensor& self, const Tensor& other, Out out),
              {.cost = elements<10>}) {
  store(out, at::logaddexp2(widen(self), widen(other)));
}
VNPU_OPERATOR(Gcd, (const Tensor& self, const Tensor& other, Out out), {.cost = elements<1>}) {
  store(out, at::gcd(self, other));
}
VNPU_OPERATOR(Heaviside, (const Tensor& input, const Tensor& values, Out out),
              {.cost = elements<1>}) {
  store(out, at::heaviside(input, values));
}
VNPU_OPERATOR(XLogYTensor, (const Tensor& self, const Tensor& other, Out out),
              {.cost = elements<10>}) {
  store(out, at::xlogy(self, other));
}
VNPU_OPERATOR(XLogYScalarSelf, (const Scalar& self, const Tensor& other, Out out),
              {.cost = elements<10>}) {
  store(out, at::xlogy(self, other));
}
VNPU_OPERATOR(XLogYScalarOther, (const Tensor& self, const Scalar& other, Out out),
              {.cost = elements<10>}) {
  store(out, at::xlogy(self, other));
}
VNPU_OPERATOR(InplaceXLogYTensor, (InOut self, const Tensor& other), {.cost = elements<10>}) {
  store(self, at::xlogy(self.tensor, other));
}
VNPU_OPERATOR(InplaceXLogYScalarOther, (InOut self, const Scalar& other), {.cost = elements<10>}) {
  store(self, at::xlogy(self.tensor, other));
}

}  // namespace vnpu::ops
