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

}  // namespace
}  // namespace vnpu::ops
