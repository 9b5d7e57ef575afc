#pragma once

// A token with k experts is k assignments, numbered token by token: assignment a is of token a / k.
// Sorting assignments by expert is stable.

#include "ops/operator.h"

namespace vnpu::ops {

// Assignments in the order of their experts.
struct SortedAssignments {
  Tensor experts;      // [n], int64: the expert of each, ascending
  Tensor assignments;  // [n], int64: which assignment stands here
};
// expert_index: [tokens, k] or [n]
SortedAssignments sort_assignments(const Tensor& expert_index);

// All assignments, those of a range of experts first: then those of later experts, then those of
// earlier ones, unsorted. The documents do not define the order after the range; it follows the
// kernel's sort (moe_init_routing_v3/op_kernel/moe_v3_sort_one_core.h), which op-plugin's test of
// npu_moe_init_routing_v2 expects too.
Tensor in_order_of_range(const Tensor& expert_index, int64_t first_expert);

// The number of assignments of each expert of [first, last). experts: [n]
Tensor count_experts(const Tensor& experts, int64_t first, int64_t last);

// Position of each assignment in the order: the inverse permutation.
Tensor positions(const Tensor& assignments);

}  // namespace vnpu::ops
