// Updates in place at the indices that a tensor holds.

#include <string>

#include "ops/attention/kv_cache.h"

namespace vnpu::ops {
static void cost_of_scatter_nd_update(const Call& call, Work& work) {
  const TensorView& updates = call.tensor("updates");
  write_part(work, bytes_of(updates), 2 * updates.numel());
}
VNPU_OPERATOR(ScatterNdUpdate, (InOut self, const Tensor& indices, const Tensor& updates),
              {.tier = kT2,
               .cost = cost_of_scatter_nd_update,
               .rules = {"CheckDtypeValid in aclnn_scatter_nd_update.cpp",
                         {{"self",
                           dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kBool, at::kShort,
                                  at::kLong, at::kChar, at::kInt}),
                           kOnBigChips},
                          {"indices", dtype({at::kInt, at::kLong})},
                          {"updates", same_dtype("self")}}}}) {
  const int64_t depth = indices.size(-1);
  if (depth > self.tensor.dim()) {
    refuse("indices address " + std::to_string(depth) + " dimensions of a tensor with " +
           std::to_string(self.tensor.dim()) + ".");
  }
  if (updates.numel() == 0) return;
  c10::List<OptionalTensor> index;
  for (int64_t i = 0; i < depth; ++i) index.push_back(indices.select(-1, i).to(at::kLong));
  self.tensor.index_put_(index, updates.to(self.tensor.scalar_type()));
}

}  // namespace vnpu::ops
