// Element-wise quotients and remainders: tensor-tensor, tensor-scalar and in-place forms. Each
// computes in the promoted dtype of its inputs and casts on writing, as ATen's iterator does.

#include <optional>
#include <string_view>

#include "ops/pointwise/rows.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

// A chip does not fail at integer division by zero, and no document states the remainder: here it
// is 0, as after a division by 1.
Tensor divisor(const Tensor& other) {
  return at::isFloatingType(other.scalar_type()) ? other : other.masked_fill(other.eq(0), 1);
}

std::optional<std::string_view> rounding_mode(int32_t mode) {
  switch (mode) {
    case 0: return std::nullopt;
    case 1: return "trunc";
    case 2: return "floor";
    default:
      refuse("mode is " + std::to_string(mode) +
             "; it must be 0 (true division), 1 (towards zero) or 2 (towards minus infinity).");
  }
}

}  // namespace

VNPU_TENSOR_TENSOR(Div, at::div_out, {.cost = elements<1>, .rules = rules_of_add()})
VNPU_TENSOR_SCALAR(Divs, at::div_out, {.cost = elements<1>, .rules = rules_of_divs()})
VNPU_INPLACE_TENSOR(InplaceDiv, at::div_out, {.cost = elements<1>, .rules = rules_of_add()})
VNPU_OPERATOR(InplaceDivs, (InOut self, const Scalar& other),
              {.cost = elements<1>, .rules = rules_of_divs()}) {
  if (at::isIntegralType(self.tensor.scalar_type(), /*includeBool=*/false)) {
    store(self.tensor, self.tensor.div(number(other)));  // cast, which ATen refuses to do
  } else {
    self.tensor.div_(number(other));
  }
}
VNPU_OPERATOR(DivMod, (const Tensor& self, const Tensor& other, int32_t mode, Out out),
              {.cost = elements<1>}) {
  at::div_out(out.tensor, self, other, rounding_mode(mode));
}
VNPU_OPERATOR(DivMods, (const Tensor& self, const Scalar& other, int32_t mode, Out out),
              {.cost = elements<1>, .rules = rules_of_divs()}) {
  at::div_out(out.tensor, self, number(other), rounding_mode(mode));
}
VNPU_OPERATOR(InplaceDivMod, (InOut self, const Tensor& other, int32_t mode),
              {.cost = elements<1>}) {
  self.tensor.div_(other, rounding_mode(mode));
}
VNPU_OPERATOR(InplaceDivMods, (InOut self, const Scalar& other, int32_t mode),
              {.cost = elements<1>}) {
  self.tensor.div_(number(other), rounding_mode(mode));
}

// Python's // and %, and C's fmod.
VNPU_TENSOR_TENSOR(FloorDivide, at::floor_divide_out, {.cost = elements<1>})
VNPU_TENSOR_SCALAR(FloorDivides, at::floor_divide_out,
                   {.cost = elements<1>,
                    .rules = {"ASCEND910B_DTYPE_SUPPORT_LIST in aclnn_floor_divide.cpp",
                              {{"self", dtype(kRealAndBool), kOnBigChips}}}})
VNPU_INPLACE_TENSOR(InplaceFloorDivide, at::floor_divide_out, {.cost = elements<1>})
VNPU_INPLACE_SCALAR(InplaceFloorDivides, at::floor_divide_out, {.cost = elements<1>})
VNPU_OPERATOR(RemainderTensorTensor, (const Tensor& self, const Tensor& other, Out out),
              {.cost = elements<10>}) {
  at::remainder_out(out.tensor, self, divisor(other));
}
VNPU_TENSOR_SCALAR(
    RemainderTensorScalar, at::remainder_out,
    {.cost = elements<10>,
     .rules = {"aclnnRemainderTensorScalar&aclnnInplaceRemainderTensorScalar.md, parameters",
               {{"self", dtype(with(kFloats, {at::kDouble, at::kInt, at::kLong})), kOnBigChips},
                {"out", same_sizes("self")}}}})
VNPU_OPERATOR(RemainderScalarTensor, (const Scalar& self, const Tensor& other, Out out),
              {.cost = elements<10>}) {
  at::remainder_out(out.tensor, number(self), divisor(other));
}
VNPU_OPERATOR(InplaceRemainderTensorTensor, (InOut self, const Tensor& other),
              {.cost = elements<10>}) {
  self.tensor.remainder_(divisor(other));
}
VNPU_INPLACE_SCALAR(InplaceRemainderTensorScalar, at::remainder_out, {.cost = elements<10>})
VNPU_OPERATOR(FmodTensor, (const Tensor& self, const Tensor& other, Out out),
              {.cost = elements<10>}) {
  at::fmod_out(out.tensor, self, divisor(other));
}
VNPU_TENSOR_SCALAR(FmodScalar, at::fmod_out, {.cost = elements<10>})

}  // namespace vnpu::ops
