// Costs of operators on each element: the bytes count, and few operations.

#include "ops/costs.h"

namespace vnpu::ops {
namespace {

using timing::Work;

// Functions that vector cores approximate in several steps.
const bool transcendental = price(
    "cost: Acos Acosh Asin Asinh Atan Atan2 Atanh Celu ClippedSwiglu Cos Cosh"
    " Elu Erf Erfc Erfinv Exp Exp2 Expm1 FastGelu"
    " FmodScalar FmodTensor GeGluV3 Gelu GeluV2 Glu Hardsigmoid Hardswish InplaceAcos"
    " InplaceAcosh InplaceAsin InplaceAsinh InplaceAtan InplaceAtan2 InplaceAtanh InplaceCelu"
    " InplaceCos InplaceCosh InplaceElu InplaceErf InplaceErfc InplaceErfinv InplaceExp"
    " InplaceExp2 InplaceExpm1 InplaceFmodScalar InplaceFmodTensor InplaceHardsigmoid"
    " InplaceHardswish InplaceLog InplaceLog10 InplaceLog1p InplaceLog2 InplaceMish"
    " InplacePowTensorScalar InplacePowTensorTensor InplaceReciprocal"
    " InplaceRemainderTensorScalar InplaceRemainderTensorTensor InplaceRsqrt InplaceSigmoid"
    " InplaceSin InplaceSinc InplaceSinh InplaceSqrt InplaceTan InplaceTanh"
    " InplaceXLogYScalarOther InplaceXLogYTensor Log Log10 Log1p Log2 LogAddExp LogAddExp2"
    " LogSigmoid LogSigmoidForward Logit Mish PowScalarTensor PowTensorScalar PowTensorTensor"
    " Reciprocal RemainderScalarTensor RemainderTensorScalar RemainderTensorTensor Rsqrt"
    " Sigmoid Silu Sin Sinc Sinh Softplus Sqrt SwiGlu SwiGluQuantV2 Tan Tanh XLogYScalarOther"
    " XLogYScalarSelf XLogYTensor",
    [](const Call& call, Work& work) { for_each_element(call, work, 10); });

// Of rows in groups, those that no group has are neither read nor written.
const bool of_experts =
    price("cost: DequantSwigluQuant DequantSwigluQuantV2", [](const Call& call, Work& work) {
      const TensorView& x = call.tensor("x");
      const int64_t rows = size_at(x, -1) > 0 ? x.numel() / size_at(x, -1) : 0;
      const int64_t live = call.has("group_index") ? routed_rows(rows) : rows;
      if (rows == 0) return;
      work.read_bytes = bytes_of(x) / rows * live;
      work.written_bytes = bytes_of(call.tensor("y")) / rows * live;
      work.vector_operations = 10 * (x.numel() / rows) * live;
      work.wide = true;
    });

const bool plain = price(
    "cost: Abs Add AddV3 Addcdiv Addcmul Adds BitwiseAndScalar BitwiseAndTensor BitwiseNot"
    " BitwiseOrScalar BitwiseOrTensor BitwiseXorScalar BitwiseXorTensor Ceil Clamp ClampMax"
    " ClampMaxTensor ClampMin ClampMinTensor ClampTensor Div DivMod DivMods Divs EqScalar"
    " EqTensor Equal Floor FloorDivide FloorDivides Frac Gcd GeScalar GeTensor GtScalar"
    " GtTensor Hardshrink Hardtanh Heaviside InplaceAdd InplaceAddcdiv InplaceAddcmul"
    " InplaceAdds InplaceBitwiseAndScalar InplaceBitwiseAndTensor InplaceBitwiseXorScalar"
    " InplaceBitwiseXorTensor InplaceCeil InplaceClampMax InplaceClampMaxTensor"
    " InplaceClampMinTensor InplaceDiv InplaceDivMod InplaceDivMods InplaceDivs"
    " InplaceEqScalar InplaceEqTensor InplaceFloor InplaceFloorDivide InplaceFloorDivides"
    " InplaceFrac InplaceGeScalar InplaceGeTensor InplaceGtScalar InplaceGtTensor"
    " InplaceHardtanh InplaceLeScalar InplaceLeTensor InplaceLeakyRelu InplaceLerp"
    " InplaceLerps InplaceLogicalAnd InplaceLogicalNot InplaceLogicalOr InplaceLtScalar"
    " InplaceLtTensor InplaceMul InplaceMuls InplaceNanToNum InplaceNeScalar InplaceNeTensor"
    " InplaceRelu InplaceRoundDecimals InplaceSub InplaceSubs InplaceThreshold IsClose"
    " IsFinite IsNegInf IsPosInf LeScalar LeTensor LeakyRelu LeftShift LeftShifts Lerp Lerps"
    " LogicalAnd LogicalNot LogicalOr LogicalXor LtScalar LtTensor Maximum Minimum Mul Muls"
    " NanToNum NeScalar NeTensor Neg Prelu Relu RightShift Round RoundDecimals Rsub Rsubs"
    " Sign Signbit Softshrink Sub Subs Threshold Trunc",
    [](const Call& call, Work& work) { for_each_element(call, work, 1); });

// Of lists: the elements of all tensors.
void for_each_of_list(const Call& call, Work& work, int64_t operations) {
  int64_t elements = 0;
  for (const TensorView* const view : call.tensors(call.has("x1") ? "x1" : "x")) {
    elements += view->numel();
    work.wide = at::elementSize(view->dtype) >= 4;
  }
  work.vector_operations = operations * elements;
}

const bool transcendental_lists = price(
    "cost: ForeachAcos ForeachAsin ForeachAtan ForeachCos ForeachCosh ForeachErf ForeachErfc"
    " ForeachExp ForeachExpm1 ForeachLog ForeachLog10 ForeachLog1p ForeachLog2 ForeachPowList"
    " ForeachPowScalarAndTensor ForeachPowScalarList ForeachPowScalarV2 ForeachReciprocal"
    " ForeachSigmoid ForeachSin ForeachSinh ForeachSqrt ForeachTan ForeachTanh",
    [](const Call& call, Work& work) { for_each_of_list(call, work, 10); });

const bool plain_lists = price(
    "cost: ForeachAbs ForeachAddListV2 ForeachAddScalarList ForeachAddScalarV2"
    " ForeachAddcdivScalarList ForeachAddcdivScalarV2 ForeachAddcmulScalarList"
    " ForeachAddcmulScalarV2 ForeachCopy ForeachDivList ForeachDivScalarList ForeachDivScalarV2"
    " ForeachLerpList ForeachLerpScalar ForeachMaximumList ForeachMaximumScalarList"
    " ForeachMaximumScalarV2 ForeachMinimumList ForeachMinimumScalarList ForeachMinimumScalarV2"
    " ForeachMulList ForeachMulScalarList ForeachMulScalarV2 ForeachNeg ForeachNorm"
    " ForeachRoundOffNumberV2 ForeachSign ForeachSubListV2 ForeachSubScalarList"
    " ForeachSubScalarV2 ForeachZeroInplace",
    [](const Call& call, Work& work) { for_each_of_list(call, work, 1); });

}  // namespace
}  // namespace vnpu::ops
