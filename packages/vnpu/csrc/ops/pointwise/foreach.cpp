// Copies of lists of tensors: weights and audio encoders are copied so.

#include "ops/dtype_lists.h"
#include "ops/operator.h"
#include "ops/pointwise/declarations.h"

namespace vnpu::ops {
namespace {

Allowed allowed_foreach_copy() {
  static constexpr char kSource[] =
      "ops-nn foreach/foreach_copy/docs/aclnnForeachCopy.md, parameters";
  return {{.bytes = 32},  // WORK_SPACE_SIZE in foreach_tiling_func.cpp
          {{"x",
            dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kShort,
                   at::kUInt16, at::kInt, at::kUInt32, at::kLong, at::kDouble, at::kBool}),
            kSource},
           {"out", same_count("x"), kSource},
           {"out", same_sizes_each("x"), kSource}},
          kBigChips};
}

}  // namespace

VNPU_OPERATOR(ForeachCopy, (const TensorList& x, const OutList& out),
              {.cost = cost_of_foreach_copy, .allowed = allowed_foreach_copy}) {
  for (size_t i = 0; i < out.size(); ++i) store(out[i], x[i]);
}

}  // namespace vnpu::ops
