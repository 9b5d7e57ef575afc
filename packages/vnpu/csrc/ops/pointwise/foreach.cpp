// Copies of lists of tensors, used for weights and audio encoders.

#include "ops/operator.h"

namespace vnpu::ops {

// Counts the elements of all tensors in the list.
static void cost_of_foreach_copy(const Call& call, Work& work) {
  for (const TensorView* const view : call.tensors("x")) {
    work.vector_operations += view->numel();
    work.wide = at::elementSize(view->dtype) >= 4;
  }
}
// Workspace: WORK_SPACE_SIZE in foreach_tiling_func.cpp.
VNPU_OPERATOR(ForeachCopy, (const TensorList& x, const OutList& out),
              {.tier = kOther,
               .cost = cost_of_foreach_copy,
               .rules = {"ops-nn foreach/foreach_copy/docs/aclnnForeachCopy.md, parameters",
                         {{"x", dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kByte,
                                       at::kShort, at::kUInt16, at::kInt, at::kUInt32, at::kLong,
                                       at::kDouble, at::kBool})},
                          {"out", {same_count("x"), same_sizes_each("x")}}},
                         {.bytes = 32},
                         kBigChips}}) {
  for (size_t i = 0; i < out.size(); ++i) store(out[i], x[i]);
}

}  // namespace vnpu::ops
