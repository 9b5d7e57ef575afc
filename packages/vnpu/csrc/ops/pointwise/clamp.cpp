// Clamping between bounds; either bound may be absent. NaN stays NaN.

#include "ops/pointwise/rows.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

static Rules rules_of_clamp() {
  return {"Ascend910B_dtype_support_list, CheckShape in aclnn_clamp.cpp",
          {{"self", dtype(kReal), kOnBigChips}, {"out", same_sizes("self")}}};
}
VNPU_OPERATOR(Clamp,
              (const Tensor& self, const OptionalScalar& clip_min, const OptionalScalar& clip_max,
               Out out),
              {.cost = elements<1>, .rules = rules_of_clamp()}) {
  require(clip_min || clip_max, "both bounds are null; at least one is needed.");
  at::clamp_out(out.tensor, self, clip_min, clip_max);
}
VNPU_OPERATOR(ClampTensor,
              (const Tensor& self, const OptionalTensor& clip_min, const OptionalTensor& clip_max,
               Out out),
              {.cost = elements<1>}) {
  require(clip_min || clip_max, "both bounds are null; at least one is needed.");
  at::clamp_out(out.tensor, self, clip_min, clip_max);
}
VNPU_OPERATOR(ClampMin, (const Tensor& self, const Scalar& clip_min, Out out),
              {.cost = elements<1>, .rules = rules_of_clamp()}) {
  at::clamp_min_out(out.tensor, self, clip_min);
}
VNPU_OPERATOR(ClampMax, (const Tensor& self, const Scalar& clip_max, Out out),
              {.cost = elements<1>, .rules = rules_of_clamp()}) {
  at::clamp_max_out(out.tensor, self, clip_max);
}
VNPU_OPERATOR(ClampMinTensor, (const Tensor& self, const Tensor& clip_min, Out out),
              {.cost = elements<1>}) {
  at::clamp_min_out(out.tensor, self, clip_min);
}
VNPU_OPERATOR(ClampMaxTensor, (const Tensor& self, const Tensor& clip_max, Out out),
              {.cost = elements<1>}) {
  at::clamp_max_out(out.tensor, self, clip_max);
}
VNPU_OPERATOR(InplaceClampMax, (InOut self, const Scalar& clip_max),
              {.tier = kOther, .cost = elements<1>}) {
  self.tensor.clamp_max_(clip_max);
}
VNPU_OPERATOR(InplaceClampMinTensor, (InOut self, const Tensor& clip_min), {.cost = elements<1>}) {
  self.tensor.clamp_min_(clip_min);
}
VNPU_OPERATOR(InplaceClampMaxTensor, (InOut self, const Tensor& clip_max), {.cost = elements<1>}) {
  self.tensor.clamp_max_(clip_max);
}

}  // namespace vnpu::ops
