// What operators on each element can be called with.
// Sources: the dtype lists for Ascend910B in aclnn_*.cpp of ops-math and ops-nn v8.5.0, which the
// documents repeat. They say nothing of 310P here.

#include "ops/dtype_lists.h"
#include "ops/pointwise/declarations.h"

namespace vnpu::ops {
namespace {

constexpr char kArithmetic[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_{add,sub,mul,div}.cpp";
constexpr char kSizes[] = "OP_CHECK_SHAPE_NOT_EQUAL in aclnn_{add,sub,mul}.cpp";
constexpr char kRsub[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_rsub.cpp";
constexpr char kEqual[] = "dtype lists for 910B in aclnn_{eq,ne}_{scalar,tensor}.cpp";
constexpr char kEqualAll[] = "CheckDtypeValid in aclnn_equal.cpp";
constexpr char kLessTensors[] = "dtype lists for 910B in aclnn_{lt,le,gt,ge}_tensor.cpp";
constexpr char kBits[] = "DTYPE_SUPPORT_LIST in aclnn_bitwise_and_{tensor,scalar}.cpp";
constexpr char kOr[] = "DTYPE_SUPPORT_LIST in aclnn_bitwise_or_tensor.cpp";
constexpr char kNot[] = "aclnn_bitwise_not.cpp: DTYPE_SUPPORT_LIST, CheckShape";
constexpr char kShift[] = "DTYPE_SUPPORT_LIST in aclnn_right_shift.cpp";
constexpr char kLogic[] = "DTYPE_SUPPORT_LIST in aclnn_logical_or.cpp";
constexpr char kClamp[] = "Ascend910B_dtype_support_list, CheckShape in aclnn_clamp.cpp";
constexpr char kLess[] = "CheckDtypeValid, CheckPromoteType in aclnn_{lt,gt,ge}_scalar.cpp";
constexpr char kMaskedFill[] = "DTYPE_SUPPORT_LIST in aclnn_masked_fill_scalar.cpp";
constexpr char kWhere[] = "CONDITION_DTYPE_SUPPORT in aclnn_s_where.cpp";
constexpr char kFunction[] = "dtype lists in aclnn_{cos,sin,reciprocal,rsqrt,sigmoid}.cpp";
constexpr char kLog[] = "ASCEND910B_OUTPUT_DTYPE_SUPPORT_LIST in aclnn_log.cpp";
constexpr char kExp[] = "aclnn_exp.cpp: DTYPE_SUPPORT_LIST_910B, CheckShape";
constexpr char kNeg[] = "aclnn_neg.cpp: dtype_support_list_afterV200, CheckShape";
constexpr char kPow[] = "DTYPE_SUPPORT_LIST, CheckShape in aclnn_pow.cpp";
constexpr char kRemainder[] =
    "aclnnRemainderTensorScalar&aclnnInplaceRemainderTensorScalar.md, parameters";
constexpr char kAddcmul[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_addcmul.cpp";
constexpr char kAbs[] = "ASCEND910B_DTYPE_DTYPE_SUPPORT_LIST in aclnn_abs.cpp";
constexpr char kExp2[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_exp2.cpp";
constexpr char kFloorDivide[] = "ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_floor_divide.cpp";
constexpr char kRoundList[] = "ASCEND910B_DTYPE_DTYPE_SUPPORT_LIST in aclnn_round.cpp";
constexpr char kSoftplus[] = "aclnn_softplus.cpp: ASCEND910B_DTYPE_SUPPORT_LIST, CheckShape";
constexpr char kRelu[] = "activation/relu/README.md, parameters";
constexpr char kGelu[] = "DTYPE_SUPPORT_LIST in aclnn_{gelu,silu}.cpp";
constexpr char kTanh[] = "aclnnTanh&aclnnInplaceTanh.md, parameters";
constexpr char kGeluV2[] = "DTYPE_SUPPORT_LIST in aclnn_gelu_v2.cpp";

const std::vector<ScalarType> kFloatsAndComplex{at::kFloat,  at::kHalf,         at::kBFloat16,
                                                at::kDouble, at::kComplexFloat, at::kComplexDouble};

}  // namespace

Allowed allowed_add() {
  return {{},
          {{"self", dtype(kNumbers), kArithmetic, kOnBigChips},
           {"other", dtype(kNumbers), kArithmetic, kOnBigChips}}};
}

Allowed allowed_inplace_add() {
  return {{},
          {{"self", dtype(kNumbers), kArithmetic, kOnBigChips},
           {"other", dtype(kNumbers), kArithmetic, kOnBigChips}}};
}

Allowed allowed_adds() {
  return {
      {},
      {{"self", dtype(kNumbers), kArithmetic, kOnBigChips}, {"out", same_sizes("self"), kSizes}}};
}

Allowed allowed_divs() { return {{}, {{"self", dtype(kNumbers), kArithmetic, kOnBigChips}}}; }

Allowed allowed_rsubs() {
  return {
      {},
      {{"self", dtype(kRealAndComplex), kRsub, kOnBigChips}, {"out", same_sizes("self"), kRsub}}};
}

Allowed allowed_lt_scalar() {
  return {
      {},
      {{"self",
        dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kInt, at::kLong, at::kShort,
               at::kChar, at::kByte, at::kBool, at::kUInt16, at::kUInt32, at::kUInt64}),
        kLess, kOnBigChips},
       {"out", same_sizes("self"), kLess}}};
}

Allowed allowed_eq_scalar() {
  return {{},
          {{"self", dtype(kNumbers), kEqual, kOnBigChips}, {"out", same_sizes("self"), kEqual}}};
}

namespace {

std::vector<Row> rows_of_two(const std::vector<ScalarType>& dtypes, const char* source) {
  return {{"self", dtype(dtypes), source, kOnBigChips},
          {"other", dtype(dtypes), source, kOnBigChips}};
}

const std::vector<ScalarType> kOrdered =
    with(kReal, {at::kBool, at::kUInt16, at::kUInt32, at::kUInt64});
const std::vector<ScalarType> kIntegers{at::kShort, at::kInt, at::kLong, at::kChar, at::kByte};
const std::vector<ScalarType> kBitDtypes = with(kIntegers, {at::kBool, at::kUInt16});
const std::vector<ScalarType> kAllIntegers =
    with(kIntegers, {at::kUInt16, at::kUInt32, at::kUInt64});

}  // namespace

Allowed allowed_eq_tensor() { return {{}, rows_of_two(kNumbers, kEqual)}; }

Allowed allowed_equal() {
  Allowed allowed{{}, rows_of_two(kOrdered, kEqualAll)};
  allowed.rows.push_back({"out", dtype({at::kBool}), kEqualAll});
  return allowed;
}

Allowed allowed_lt_tensor() { return {{}, rows_of_two(kOrdered, kLessTensors)}; }

Allowed allowed_le_tensor() {
  return {{}, rows_of_two(with(kReal, {at::kBool, at::kUInt16}), kLessTensors)};
}

Allowed allowed_logical_or() { return {{}, rows_of_two(kNumbers, kLogic)}; }

Allowed allowed_bitwise_and_tensor() { return {{}, rows_of_two(kBitDtypes, kBits)}; }

Allowed allowed_bitwise_and_scalar() {
  return {{},
          {{"self", dtype(kBitDtypes), kBits, kOnBigChips}, {"out", same_sizes("self"), kBits}}};
}

Allowed allowed_inplace_bitwise_and_scalar() {
  return {{}, {{"self", dtype(kBitDtypes), kBits, kOnBigChips}}};
}

Allowed allowed_bitwise_or_tensor() {
  return {{}, rows_of_two(with(kAllIntegers, {at::kBool}), kOr)};
}

Allowed allowed_bitwise_not() {
  return {{},
          {{"self", dtype(with(kIntegers, {at::kBool})), kNot, kOnBigChips},
           {"out", same_dtype("self"), kNot},
           {"out", same_sizes("self"), kNot}}};
}

Allowed allowed_right_shift() {
  Allowed allowed{{}, rows_of_two(kAllIntegers, kShift)};
  allowed.rows.push_back({"out", dtype(kAllIntegers), kShift, kOnBigChips});
  return allowed;
}

Allowed allowed_clamp() {
  return {{}, {{"self", dtype(kReal), kClamp, kOnBigChips}, {"out", same_sizes("self"), kClamp}}};
}

Allowed allowed_inplace_masked_fill_scalar() {
  return {
      {},
      {{"self",
        dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kChar, at::kBool}),
        kMaskedFill, kOnBigChips},
       {"mask", dtype({at::kBool}), kMaskedFill}}};
}

Allowed allowed_s_where() { return {{}, {{"condition", dtype({at::kBool, at::kByte}), kWhere}}}; }

Allowed allowed_cos() {
  return {{},
          {{"self", dtype(kNumbers), kFunction, kOnBigChips},
           {"out", dtype(kFloatsAndComplex), kFunction, kOnBigChips},
           {"out", same_sizes("self"), kFunction}}};
}

Allowed allowed_exp() {
  return {{},
          {{"self", dtype(with(kFloatsAndComplex, {at::kBool, at::kLong})), kExp, kOnBigChips},
           {"out", same_sizes("self"), kExp}}};
}

Allowed allowed_neg() {
  return {{},
          {{"self", dtype(with(kFloatsAndComplex, {at::kChar, at::kInt, at::kLong})), kNeg,
            kOnBigChips},
           {"out", same_sizes("self"), kNeg}}};
}

Allowed allowed_pow_tensor_scalar() {
  return {{}, {{"self", dtype(kNumbers), kPow, kOnBigChips}, {"out", same_sizes("self"), kPow}}};
}

Allowed allowed_pow_scalar_tensor() {
  return {
      {},
      {{"exponent", dtype(kNumbers), kPow, kOnBigChips}, {"out", same_sizes("exponent"), kPow}}};
}

Allowed allowed_remainder_tensor_scalar() {
  return {
      {},
      {{"self", dtype(with(kFloats, {at::kDouble, at::kInt, at::kLong})), kRemainder, kOnBigChips},
       {"out", same_sizes("self"), kRemainder}}};
}

Allowed allowed_inplace_addcmul() {
  const std::vector<ScalarType> dtypes =
      with(kFloats, {at::kDouble, at::kInt, at::kLong, at::kChar, at::kByte});
  return {{},
          {{"self", dtype(dtypes), kAddcmul, kOnBigChips},
           {"tensor1", dtype(dtypes), kAddcmul, kOnBigChips},
           {"tensor2", dtype(dtypes), kAddcmul, kOnBigChips}}};
}

Allowed allowed_abs() {
  return {{}, {{"self", dtype(with(kRealAndBool, {at::kComplexFloat})), kAbs, kOnBigChips}}};
}

Allowed allowed_exp2() { return {{}, {{"self", dtype(kRealAndBool), kExp2, kOnBigChips}}}; }

Allowed allowed_floor_divides() {
  return {{}, {{"self", dtype(kRealAndBool), kFloorDivide, kOnBigChips}}};
}

Allowed allowed_round() {
  return {{},
          {{"self", dtype(with(kFloats, {at::kDouble, at::kInt, at::kLong})), kRoundList,
            kOnBigChips}}};
}

Allowed allowed_softplus() {
  return {
      {},
      {{"self", dtype(kFloats), kSoftplus, kOnBigChips}, {"out", same_sizes("self"), kSoftplus}}};
}

Allowed allowed_inplace_log() {
  return {{}, {{"self", dtype(kFloatsAndComplex), kLog, kOnBigChips}}};
}

Allowed allowed_relu() {
  const auto dtypes = with(kFloats, {at::kChar, at::kByte, at::kInt, at::kLong});
  return {{},
          {{"self", dtype(dtypes), kRelu, kOnBigChips},
           {"out", same_dtype("self"), kRelu},
           {"out", same_sizes("self"), kRelu}}};
}

Allowed allowed_inplace_relu() {
  const auto dtypes = with(kFloats, {at::kChar, at::kByte, at::kInt, at::kLong});
  return {{}, {{"self", dtype(dtypes), kRelu, kOnBigChips}}};
}

Allowed allowed_gelu() {
  return {{},
          {{"self", dtype(kFloats), kGelu, kOnBigChips},
           {"out", same_dtype("self"), kGelu},
           {"out", same_sizes("self"), kGelu}}};
}

Allowed allowed_tanh() {
  return {
      {},
      {{"self",
        dtype(with(kFloats, {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong})),
        kTanh, kOnBigChips},
       {"out", dtype(kFloats), kTanh, kOnBigChips},
       {"out", same_sizes("self"), kTanh}}};
}

Allowed allowed_gelu_v2() {
  return {{},
          {{"x", dtype(kFloats), kGeluV2, kOnBigChips},
           {"out", same_dtype("x"), kGeluV2},
           {"out", same_sizes("x"), kGeluV2}}};
}

}  // namespace vnpu::ops
