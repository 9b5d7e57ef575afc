// Comparisons, logic and bits. Comparisons write bool, or 0 and 1 in the output's own dtype.

#include "ops/operator.h"
#include "ops/pointwise/declarations.h"

namespace vnpu::ops {

#define VNPU_TENSOR_TENSOR(NAME, FUNCTION_OUT, ...)                                      \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Tensor& other, Out out), __VA_ARGS__) { \
    FUNCTION_OUT(out.tensor, self, other);                                               \
  }
#define VNPU_TENSOR_SCALAR(NAME, FUNCTION_OUT, ...)                                      \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Scalar& other, Out out), __VA_ARGS__) { \
    FUNCTION_OUT(out.tensor, self, number(other));                                       \
  }
#define VNPU_INPLACE_TENSOR(NAME, FUNCTION_OUT, ...)                    \
  VNPU_OPERATOR(NAME, (InOut self, const Tensor& other), __VA_ARGS__) { \
    FUNCTION_OUT(self.tensor, self.tensor, other);                      \
  }
#define VNPU_INPLACE_SCALAR(NAME, FUNCTION_OUT, ...)                    \
  VNPU_OPERATOR(NAME, (InOut self, const Scalar& other), __VA_ARGS__) { \
    FUNCTION_OUT(self.tensor, self.tensor, number(other));              \
  }
// --- comparisons --------------------------------------------------------------------------------

VNPU_TENSOR_TENSOR(EqTensor, at::eq_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_eq_tensor})
VNPU_TENSOR_SCALAR(EqScalar, at::eq_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_eq_scalar})
VNPU_INPLACE_TENSOR(InplaceEqTensor, at::eq_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceEqScalar, at::eq_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(NeTensor, at::ne_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_eq_tensor})
VNPU_TENSOR_SCALAR(NeScalar, at::ne_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_eq_scalar})
VNPU_INPLACE_TENSOR(InplaceNeTensor, at::ne_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceNeScalar, at::ne_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(LtTensor, at::lt_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_lt_tensor})
VNPU_TENSOR_SCALAR(LtScalar, at::lt_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_lt_scalar})
VNPU_INPLACE_TENSOR(InplaceLtTensor, at::lt_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceLtScalar, at::lt_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(LeTensor, at::le_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_le_tensor})
VNPU_TENSOR_SCALAR(LeScalar, at::le_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_TENSOR(InplaceLeTensor, at::le_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceLeScalar, at::le_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(GtTensor, at::gt_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_lt_tensor})
VNPU_TENSOR_SCALAR(GtScalar, at::gt_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_lt_scalar})
VNPU_INPLACE_TENSOR(InplaceGtTensor, at::gt_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceGtScalar, at::gt_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(GeTensor, at::ge_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_lt_tensor})
VNPU_TENSOR_SCALAR(GeScalar, at::ge_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_lt_scalar})
VNPU_INPLACE_TENSOR(InplaceGeTensor, at::ge_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceGeScalar, at::ge_out, {.tier = kT1, .cost = elements<1>})

// torch.equal: one bool for the whole tensors.
VNPU_OPERATOR(Equal, (const Tensor& self, const Tensor& other, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_equal}) {
  out.tensor.fill_(at::equal(self, other));
}
// |self - other| <= atol + rtol * |other|
VNPU_OPERATOR(IsClose,
              (const Tensor& self, const Tensor& other, double rtol, double atol, bool equal_nan,
               Out out),
              {.tier = kT1, .cost = elements<1>}) {
  store(out, at::isclose(self, other, rtol, atol, equal_nan));
}

// --- logic --------------------------------------------------------------------------------------

VNPU_TENSOR_TENSOR(LogicalAnd, at::logical_and_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(LogicalOr, at::logical_or_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_logical_or})
VNPU_TENSOR_TENSOR(LogicalXor, at::logical_xor_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_TENSOR(InplaceLogicalAnd, at::logical_and_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_TENSOR(InplaceLogicalOr, at::logical_or_out,
                    {.tier = kT1, .cost = elements<1>, .allowed = allowed_logical_or})
VNPU_OPERATOR(LogicalNot, (const Tensor& self, Out out), {.tier = kT1, .cost = elements<1>}) {
  at::logical_not_out(out.tensor, self);
}
VNPU_OPERATOR(InplaceLogicalNot, (InOut self), {.tier = kT1, .cost = elements<1>}) {
  self.tensor.logical_not_();
}

// --- bits ---------------------------------------------------------------------------------------

VNPU_TENSOR_TENSOR(BitwiseAndTensor, at::bitwise_and_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_bitwise_and_tensor})
VNPU_TENSOR_SCALAR(BitwiseAndScalar, at::bitwise_and_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_bitwise_and_scalar})
VNPU_INPLACE_TENSOR(InplaceBitwiseAndTensor, at::bitwise_and_out,
                    {.tier = kT1, .cost = elements<1>, .allowed = allowed_bitwise_and_tensor})
VNPU_INPLACE_SCALAR(InplaceBitwiseAndScalar, at::bitwise_and_out,
                    {.tier = kT1,
                     .cost = elements<1>,
                     .allowed = allowed_inplace_bitwise_and_scalar})
VNPU_TENSOR_TENSOR(BitwiseOrTensor, at::bitwise_or_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_bitwise_or_tensor})
VNPU_TENSOR_SCALAR(BitwiseOrScalar, at::bitwise_or_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(BitwiseXorTensor, at::bitwise_xor_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_SCALAR(BitwiseXorScalar, at::bitwise_xor_out, {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_TENSOR(InplaceBitwiseXorTensor, at::bitwise_xor_out,
                    {.tier = kT1, .cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceBitwiseXorScalar, at::bitwise_xor_out,
                    {.tier = kT1, .cost = elements<1>})
VNPU_OPERATOR(BitwiseNot, (const Tensor& self, Out out),
              {.tier = kT1, .cost = elements<1>, .allowed = allowed_bitwise_not}) {
  at::bitwise_not_out(out.tensor, self);
}
VNPU_TENSOR_TENSOR(LeftShift, at::bitwise_left_shift_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_SCALAR(LeftShifts, at::bitwise_left_shift_out, {.tier = kT1, .cost = elements<1>})
VNPU_TENSOR_TENSOR(RightShift, at::bitwise_right_shift_out,
                   {.tier = kT1, .cost = elements<1>, .allowed = allowed_right_shift})

}  // namespace vnpu::ops
