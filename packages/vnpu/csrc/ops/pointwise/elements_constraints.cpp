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
constexpr char kEqual[] = "dtype lists for 910B in aclnn_{eq,ne}_scalar.cpp, aclnn_ne_tensor.cpp";
constexpr char kLessTensors[] = "dtype lists for 910B in aclnn_{lt,le}_tensor.cpp";
constexpr char kBits[] = "DTYPE_SUPPORT_LIST in aclnn_bitwise_and_tensor.cpp";
constexpr char kClamp[] = "Ascend910B_dtype_support_list, CheckShape in aclnn_clamp.cpp";
constexpr char kLess[] = "CheckDtypeValid in aclnn_lt_scalar.cpp";
constexpr char kMaskedFill[] = "DTYPE_SUPPORT_LIST in aclnn_masked_fill_scalar.cpp";
constexpr char kWhere[] = "CONDITION_DTYPE_SUPPORT in aclnn_s_where.cpp";
constexpr char kFunction[] = "dtype lists in aclnn_{cos,sin,reciprocal,sigmoid}.cpp";
constexpr char kLog[] = "ASCEND910B_OUTPUT_DTYPE_SUPPORT_LIST in aclnn_log.cpp";
constexpr char kGelu[] = "DTYPE_SUPPORT_LIST in aclnn_{gelu,silu}.cpp";
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

Allowed allowed_ne_tensor() {
  return {{},
          {{"self", dtype(kNumbers), kEqual, kOnBigChips},
           {"other", dtype(kNumbers), kEqual, kOnBigChips}}};
}

namespace {

std::vector<Row> less_rows(const std::vector<ScalarType>& dtypes) {
  return {{"self", dtype(dtypes), kLessTensors, kOnBigChips},
          {"other", dtype(dtypes), kLessTensors, kOnBigChips}};
}
}  // namespace

Allowed allowed_lt_tensor() {
  return {{}, less_rows(with(kReal, {at::kBool, at::kUInt16, at::kUInt32, at::kUInt64}))};
}

Allowed allowed_le_tensor() { return {{}, less_rows(with(kReal, {at::kBool, at::kUInt16}))}; }

namespace {

const std::vector<ScalarType> kBitDtypes{at::kShort, at::kInt,  at::kLong,  at::kChar,
                                         at::kByte,  at::kBool, at::kUInt16};
}  // namespace

Allowed allowed_bitwise_and_tensor() {
  return {{},
          {{"self", dtype(kBitDtypes), kBits, kOnBigChips},
           {"other", dtype(kBitDtypes), kBits, kOnBigChips}}};
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

Allowed allowed_inplace_log() {
  return {{}, {{"self", dtype(kFloatsAndComplex), kLog, kOnBigChips}}};
}

Allowed allowed_gelu() {
  return {{},
          {{"self", dtype(kFloats), kGelu, kOnBigChips},
           {"out", same_dtype("self"), kGelu},
           {"out", same_sizes("self"), kGelu}}};
}

Allowed allowed_gelu_v2() {
  return {{},
          {{"x", dtype(kFloats), kGeluV2, kOnBigChips},
           {"out", same_dtype("x"), kGeluV2},
           {"out", same_sizes("x"), kGeluV2}}};
}

}  // namespace vnpu::ops
