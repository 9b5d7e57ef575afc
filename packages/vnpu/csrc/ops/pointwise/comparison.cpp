// Comparisons, logic and bits. Comparisons write bool, or 0 and 1 in the output's own dtype.

#include "ops/pointwise/rows.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

// Neither operator has rules.
#define VNPU_INPLACE_BOTH(NAME, FUNCTION_OUT)                                     \
  VNPU_INPLACE_TENSOR(Inplace##NAME##Tensor, FUNCTION_OUT, {.cost = elements<1>}) \
  VNPU_INPLACE_SCALAR(Inplace##NAME##Scalar, FUNCTION_OUT, {.cost = elements<1>})

// --- comparisons --------------------------------------------------------------------------------

constexpr char kEqual[] = "dtype lists for 910B in aclnn_{eq,ne}_{scalar,tensor}.cpp";
static Rules rules_of_two(const char* source, const std::vector<ScalarType>& dtypes) {
  return {source, {{"self, other", dtype(dtypes), kOnBigChips}}};
}
VNPU_TENSOR_TENSOR(EqTensor, at::eq_out,
                   {.cost = elements<1>, .rules = rules_of_two(kEqual, kNumbers)})
static Rules rules_of_eq_scalar() {
  return {kEqual, {{"self", dtype(kNumbers), kOnBigChips}, {"out", same_sizes("self")}}};
}
VNPU_TENSOR_SCALAR(EqScalar, at::eq_out, {.cost = elements<1>, .rules = rules_of_eq_scalar()})
VNPU_INPLACE_BOTH(Eq, at::eq_out)
VNPU_TENSOR_TENSOR(NeTensor, at::ne_out,
                   {.cost = elements<1>, .rules = rules_of_two(kEqual, kNumbers)})
VNPU_TENSOR_SCALAR(NeScalar, at::ne_out, {.cost = elements<1>, .rules = rules_of_eq_scalar()})
VNPU_INPLACE_BOTH(Ne, at::ne_out)
constexpr char kLessTensors[] = "dtype lists for 910B in aclnn_{lt,le,gt,ge}_tensor.cpp";
const std::vector<ScalarType> kOrdered =
    with(kReal, {at::kBool, at::kUInt16, at::kUInt32, at::kUInt64});
VNPU_TENSOR_TENSOR(LtTensor, at::lt_out,
                   {.cost = elements<1>, .rules = rules_of_two(kLessTensors, kOrdered)})
static Rules rules_of_lt_scalar() {
  return {
      "CheckDtypeValid, CheckPromoteType in aclnn_{lt,gt,ge}_scalar.cpp",
      {{"self",
        dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kInt, at::kLong, at::kShort,
               at::kChar, at::kByte, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64}),
        kOnBigChips},
       {"out", same_sizes("self")}}};
}
VNPU_TENSOR_SCALAR(LtScalar, at::lt_out, {.cost = elements<1>, .rules = rules_of_lt_scalar()})
VNPU_INPLACE_BOTH(Lt, at::lt_out)
VNPU_TENSOR_TENSOR(LeTensor, at::le_out,
                   {.cost = elements<1>,
                    .rules = rules_of_two(kLessTensors, with(kReal, {at::kBool, at::kUInt16}))})
VNPU_TENSOR_SCALAR(LeScalar, at::le_out, {.cost = elements<1>})
VNPU_INPLACE_BOTH(Le, at::le_out)
VNPU_TENSOR_TENSOR(GtTensor, at::gt_out,
                   {.cost = elements<1>, .rules = rules_of_two(kLessTensors, kOrdered)})
VNPU_TENSOR_SCALAR(GtScalar, at::gt_out, {.cost = elements<1>, .rules = rules_of_lt_scalar()})
VNPU_INPLACE_BOTH(Gt, at::gt_out)
VNPU_TENSOR_TENSOR(GeTensor, at::ge_out,
                   {.cost = elements<1>, .rules = rules_of_two(kLessTensors, kOrdered)})
VNPU_TENSOR_SCALAR(GeScalar, at::ge_out, {.cost = elements<1>, .rules = rules_of_lt_scalar()})
VNPU_INPLACE_BOTH(Ge, at::ge_out)

// torch.equal: one bool for the whole tensors.
VNPU_OPERATOR(Equal, (const Tensor& self, const Tensor& other, Out out),
              {.cost = elements<1>,
               .rules = {
                   "CheckDtypeValid in aclnn_equal.cpp",
                   {{"self, other", dtype(kOrdered), kOnBigChips}, {"out", dtype({at::kBool})}}}}) {
  out.tensor.fill_(at::equal(self, other));
}
// |self - other| <= atol + rtol * |other|
VNPU_OPERATOR(IsClose,
              (const Tensor& self, const Tensor& other, double rtol, double atol, bool equal_nan,
               Out out),
              {.cost = elements<1>}) {
  store(out, at::isclose(self, other, rtol, atol, equal_nan));
}

// --- logic --------------------------------------------------------------------------------------

VNPU_TENSOR_TENSOR(LogicalAnd, at::logical_and_out, {.cost = elements<1>})
VNPU_TENSOR_TENSOR(LogicalOr, at::logical_or_out,
                   {.cost = elements<1>,
                    .rules = rules_of_two("DTYPE_SUPPORT_LIST in aclnn_logical_or.cpp", kNumbers)})
VNPU_TENSOR_TENSOR(LogicalXor, at::logical_xor_out, {.cost = elements<1>})
VNPU_INPLACE_TENSOR(InplaceLogicalAnd, at::logical_and_out, {.cost = elements<1>})
VNPU_INPLACE_TENSOR(InplaceLogicalOr, at::logical_or_out,
                    {.cost = elements<1>,
                     .rules = rules_of_two("DTYPE_SUPPORT_LIST in aclnn_logical_or.cpp", kNumbers)})
VNPU_UNARY(LogicalNot, at::logical_not_out,
           {.cost = elements<1>,
            .rules = {
                "aclnn_logical_not.cpp: dtype_support_list, CheckShape",
                {{"self, out", dtype(kRealAndBool), kOnBigChips}, {"out", same_sizes("self")}}}})
VNPU_OPERATOR(InplaceLogicalNot, (InOut self), {.cost = elements<1>}) {
  self.tensor.logical_not_();
}

// --- bits ---------------------------------------------------------------------------------------

constexpr char kBits[] = "DTYPE_SUPPORT_LIST in aclnn_bitwise_and_{tensor,scalar}.cpp";
const std::vector<ScalarType> kIntegers{at::kShort, at::kInt, at::kLong, at::kChar, at::kByte};
const std::vector<ScalarType> kBitDtypes = with(kIntegers, {at::kBool, at::kUInt16});
VNPU_TENSOR_TENSOR(BitwiseAndTensor, at::bitwise_and_out,
                   {.cost = elements<1>, .rules = rules_of_two(kBits, kBitDtypes)})
VNPU_TENSOR_SCALAR(
    BitwiseAndScalar, at::bitwise_and_out,
    {.cost = elements<1>,
     .rules = {kBits, {{"self", dtype(kBitDtypes), kOnBigChips}, {"out", same_sizes("self")}}}})
VNPU_INPLACE_TENSOR(InplaceBitwiseAndTensor, at::bitwise_and_out,
                    {.cost = elements<1>, .rules = rules_of_two(kBits, kBitDtypes)})
VNPU_INPLACE_SCALAR(InplaceBitwiseAndScalar, at::bitwise_and_out,
                    {.cost = elements<1>,
                     .rules = {kBits, {{"self", dtype(kBitDtypes), kOnBigChips}}}})
const std::vector<ScalarType> kAllIntegers =
    with(kIntegers, {at::kUInt16, at::kUInt32, at::kUInt64});
VNPU_TENSOR_TENSOR(BitwiseOrTensor, at::bitwise_or_out,
                   {.cost = elements<1>,
                    .rules = rules_of_two("DTYPE_SUPPORT_LIST in aclnn_bitwise_or_tensor.cpp",
                                          with(kAllIntegers, {at::kBool}))})
VNPU_TENSOR_SCALAR(BitwiseOrScalar, at::bitwise_or_out, {.cost = elements<1>})
VNPU_TENSOR_TENSOR(BitwiseXorTensor, at::bitwise_xor_out, {.cost = elements<1>})
VNPU_TENSOR_SCALAR(BitwiseXorScalar, at::bitwise_xor_out, {.cost = elements<1>})
VNPU_INPLACE_BOTH(BitwiseXor, at::bitwise_xor_out)
VNPU_UNARY(BitwiseNot, at::bitwise_not_out,
           {.cost = elements<1>,
            .rules = {"aclnn_bitwise_not.cpp: DTYPE_SUPPORT_LIST, CheckShape",
                      {{"self", dtype(with(kIntegers, {at::kBool})), kOnBigChips},
                       {"out", {same_dtype("self"), same_sizes("self")}}}}})
VNPU_TENSOR_TENSOR(LeftShift, at::bitwise_left_shift_out, {.cost = elements<1>})
VNPU_TENSOR_SCALAR(LeftShifts, at::bitwise_left_shift_out, {.cost = elements<1>})
VNPU_TENSOR_TENSOR(RightShift, at::bitwise_right_shift_out,
                   {.cost = elements<1>,
                    .rules = {"DTYPE_SUPPORT_LIST in aclnn_right_shift.cpp",
                              {{"self, other, out", dtype(kAllIntegers), kOnBigChips}}}})

}  // namespace vnpu::ops
