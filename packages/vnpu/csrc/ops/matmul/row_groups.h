#pragma once

#include <vector>

#include "ops/matmul/fractal_layout.h"
#include "ops/operator.h"

namespace vnpu::ops {

// const LaidOutList&: aclTensorList*, read; each tensor's memory may lie in FRACTAL_NZ.
struct LaidOutList : std::vector<LaidOut> {
  using std::vector<LaidOut>::vector;
};
template <>
struct Argument<LaidOutList> {
  using C = const aclTensorList*;
  using Kept = std::vector<Argument<LaidOut>::Kept>;
  static Kept keep(C c, Launch& launch);
  static LaidOutList value(const Kept& kept, Tensors& tensors);
};

// The content of groupList: the end of each group, the size of each, or pairs (group, size).
enum class GroupListForm : int64_t { kEnds = 0, kCounts = 1, kPairs = 2 };

// Rows [start, start + count) belong to expert `index`.
struct Group {
  int64_t index, start, count;
};
std::vector<Group> row_groups(const Tensor& group_list, GroupListForm form, int64_t rows);

// The group's tensor: an entry of the list, or a slice of its only tensor, [groups, ...].
Tensor of_group(const std::vector<Tensor>& list, int64_t group, int64_t dims_of_one);

// Cost of products of a group of rows for each expert. Routing allocates more rows than are used.
void multiply_groups(const Call& call, Work& work, const char* out_name, int64_t columns_per_out);

}  // namespace vnpu::ops
