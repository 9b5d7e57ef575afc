// Comparisons, logic and bits. Comparisons write bool, or 0 and 1 in the output's own dtype.

#include "ops/operator.h"

namespace vnpu::ops {

#define VNPU_TENSOR_TENSOR(NAME, FUNCTION_OUT)                              \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Tensor& other, Out out)) { \
    FUNCTION_OUT(out.tensor, self, other);                                  \
  }
#define VNPU_TENSOR_SCALAR(NAME, FUNCTION_OUT)                              \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Scalar& other, Out out)) { \
    FUNCTION_OUT(out.tensor, self, number(other));                          \
  }
#define VNPU_INPLACE_TENSOR(NAME, FUNCTION_OUT)            \
  VNPU_OPERATOR(NAME, (InOut self, const Tensor& other)) { \
    FUNCTION_OUT(self.tensor, self.tensor, other);         \
  }
#define VNPU_INPLACE_SCALAR(NAME, FUNCTION_OUT)            \
  VNPU_OPERATOR(NAME, (InOut self, const Scalar& other)) { \
    FUNCTION_OUT(self.tensor, self.tensor, number(other)); \
  }
// The four forms of one comparison or bit operation.
#define VNPU_FOUR_FORMS(NAME, FUNCTION_OUT)                \
  VNPU_TENSOR_TENSOR(NAME##Tensor, FUNCTION_OUT)           \
  VNPU_TENSOR_SCALAR(NAME##Scalar, FUNCTION_OUT)           \
  VNPU_INPLACE_TENSOR(Inplace##NAME##Tensor, FUNCTION_OUT) \
  VNPU_INPLACE_SCALAR(Inplace##NAME##Scalar, FUNCTION_OUT)

// --- comparisons --------------------------------------------------------------------------------

VNPU_FOUR_FORMS(Eq, at::eq_out)
VNPU_FOUR_FORMS(Ne, at::ne_out)
VNPU_FOUR_FORMS(Lt, at::lt_out)
VNPU_FOUR_FORMS(Le, at::le_out)
VNPU_FOUR_FORMS(Gt, at::gt_out)
VNPU_FOUR_FORMS(Ge, at::ge_out)

// torch.equal: one bool for the whole tensors.
VNPU_OPERATOR(Equal, (const Tensor& self, const Tensor& other, Out out)) {
  out.tensor.fill_(at::equal(self, other));
}
// |self - other| <= atol + rtol * |other|
VNPU_OPERATOR(IsClose, (const Tensor& self, const Tensor& other, double rtol, double atol,
                        bool equal_nan, Out out)) {
  store(out, at::isclose(self, other, rtol, atol, equal_nan));
}

// --- logic --------------------------------------------------------------------------------------

VNPU_TENSOR_TENSOR(LogicalAnd, at::logical_and_out)
VNPU_TENSOR_TENSOR(LogicalOr, at::logical_or_out)
VNPU_TENSOR_TENSOR(LogicalXor, at::logical_xor_out)
VNPU_INPLACE_TENSOR(InplaceLogicalAnd, at::logical_and_out)
VNPU_INPLACE_TENSOR(InplaceLogicalOr, at::logical_or_out)
VNPU_OPERATOR(LogicalNot, (const Tensor& self, Out out)) { at::logical_not_out(out.tensor, self); }
VNPU_OPERATOR(InplaceLogicalNot, (InOut self)) { self.tensor.logical_not_(); }

// --- bits ---------------------------------------------------------------------------------------

VNPU_FOUR_FORMS(BitwiseAnd, at::bitwise_and_out)
VNPU_TENSOR_TENSOR(BitwiseOrTensor, at::bitwise_or_out)
VNPU_TENSOR_SCALAR(BitwiseOrScalar, at::bitwise_or_out)
VNPU_FOUR_FORMS(BitwiseXor, at::bitwise_xor_out)
VNPU_OPERATOR(BitwiseNot, (const Tensor& self, Out out)) { at::bitwise_not_out(out.tensor, self); }
VNPU_TENSOR_TENSOR(LeftShift, at::bitwise_left_shift_out)
VNPU_TENSOR_SCALAR(LeftShifts, at::bitwise_left_shift_out)
VNPU_TENSOR_TENSOR(RightShift, at::bitwise_right_shift_out)

}  // namespace vnpu::ops
