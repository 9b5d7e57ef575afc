// Costs of operators on each element: the bytes count, and few operations.

#include "ops/pointwise/declarations.h"

namespace vnpu::ops {
namespace {

using timing::Work;

}  // namespace

// Of rows in groups, those that no group has are neither read nor written.
void cost_of_dequant_swiglu_quant(const Call& call, Work& work) {
  const TensorView& x = call.tensor("x");
  const int64_t rows = size_at(x, -1) > 0 ? x.numel() / size_at(x, -1) : 0;
  const int64_t live = call.has("group_index") ? routed_rows(rows) : rows;
  if (rows == 0) return;
  work.read_bytes = bytes_of(x) / rows * live;
  work.written_bytes = bytes_of(call.tensor("y")) / rows * live;
  work.vector_operations = 10 * (x.numel() / rows) * live;
  work.wide = true;
}

// Of lists: the elements of all tensors.
void cost_of_foreach_copy(const Call& call, Work& work) {
  for (const TensorView* const view : call.tensors("x")) {
    work.vector_operations += view->numel();
    work.wide = at::elementSize(view->dtype) >= 4;
  }
}

}  // namespace vnpu::ops
