#include "ops/moe/assignments.h"

#include <limits>

namespace vnpu::ops {

SortedAssignments sort_assignments(const Tensor& expert_index) {
  const auto [experts, order] =
      at::sort(expert_index.reshape({-1}).to(at::kLong), /*stable=*/true, 0, /*descending=*/false);
  return {experts, order};
}

Tensor in_order_of_range(const Tensor& expert_index, int64_t first_expert) {
  const Tensor experts = expert_index.reshape({-1}).to(at::kLong);
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  return sort_assignments(experts.masked_fill(experts.lt(first_expert), kLast)).assignments;
}

Tensor count_experts(const Tensor& experts, int64_t first, int64_t last) {
  const Tensor inside =
      experts.masked_select(experts.ge(first).logical_and(experts.lt(last))) - first;
  return at::bincount(inside, {}, last - first);
}

Tensor positions(const Tensor& assignments) {
  Tensor inverse = at::empty_like(assignments);
  inverse.scatter_(0, assignments, at::arange(assignments.size(0), at::kLong));
  return inverse;
}

}  // namespace vnpu::ops
