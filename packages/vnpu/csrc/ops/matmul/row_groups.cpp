#include "ops/matmul/row_groups.h"

#include <algorithm>

#include "ops/handles.h"

namespace vnpu::ops {

auto Argument<LaidOutList>::keep(C c, Launch& launch) -> Kept {
  if (c == nullptr) launch.missing();
  Kept kept;
  for (const aclTensor* tensor : c->tensors)
    kept.push_back(Argument<LaidOut>::keep(tensor, launch));
  return kept;
}

LaidOutList Argument<LaidOutList>::value(const Kept& kept, Tensors& tensors) {
  LaidOutList list;
  for (const auto& one : kept) list.push_back(Argument<LaidOut>::value(one, tensors));
  return list;
}

std::vector<Group> row_groups(const Tensor& group_list, GroupListForm form, int64_t rows) {
  const Tensor values = group_list.to(at::kLong).contiguous();
  const auto* const entry = values.const_data_ptr<int64_t>();
  std::vector<Group> groups;
  int64_t start = 0;
  const auto add = [&](int64_t expert, int64_t count) {
    if (count < 0 || start + count > rows) {
      refuse("groupList puts rows " + std::to_string(start) + " to " +
             std::to_string(start + count) + " into group " + std::to_string(expert) +
             ", but there are " + std::to_string(rows) + " rows.");
    }
    groups.push_back({expert, start, count});
    start += count;
  };
  switch (form) {
    case GroupListForm::kEnds:
      for (int64_t i = 0; i < values.numel(); ++i) add(i, entry[i] - start);
      break;
    case GroupListForm::kCounts:
      for (int64_t i = 0; i < values.numel(); ++i) add(i, entry[i]);
      break;
    case GroupListForm::kPairs:
      for (int64_t i = 0; i + 1 < values.numel(); i += 2) {
        if (entry[i + 1] > 0) add(entry[i], entry[i + 1]);  // the list ends with zeros
      }
      break;
    default:
      refuse("groupListType " + std::to_string(static_cast<int64_t>(form)) +
             " is not known; use 0, 1 or 2.");
  }
  return groups;
}

Tensor of_group(const std::vector<Tensor>& list, int64_t group, int64_t dims_of_one) {
  if (list.size() > 1) return list[static_cast<size_t>(group)];
  const Tensor& all = list.front();
  if (all.dim() <= dims_of_one) return all;
  if (group < 0 || group >= all.size(0)) {
    refuse("group " + std::to_string(group) + " is not among the " + std::to_string(all.size(0)) +
           " of a parameter.");
  }
  return all[group];
}

void multiply_groups(const Call& call, Work& work, const char* out_name, int64_t columns_per_out) {
  work.kind = Work::Class::kMatmul;
  const std::vector<const TensorView*> inputs = call.tensors("x");
  const std::vector<const TensorView*> weights = call.tensors("weight");
  const TensorView& out = call.tensor(out_name);
  int64_t rows = 0;
  for (const TensorView* x : inputs) rows += size_of(*x, -1) > 0 ? x->numel() / size_of(*x, -1) : 0;
  const int64_t groups = weights.size() > 1 ? static_cast<int64_t>(weights.size())
                                            : std::max<int64_t>(size_of(*weights.front(), 0), 1);
  const bool is_routed = call.has("group_list");
  const int64_t live = is_routed ? routed_rows(rows) : rows;
  MatrixProduct product;
  product.batch = std::min(groups, live);
  product.m = (live + groups - 1) / groups;
  product.n = size_of(out, -1) * columns_per_out;
  product.k = size_of(*inputs.front(), -1);
  product.arithmetic = arithmetic_of(*inputs.front());
  work.products.push_back(product);
  int64_t read = live * product.k * static_cast<int64_t>(c10::elementSize(inputs.front()->dtype));
  int64_t weight_bytes = 0;
  for (const TensorView* weight : weights) weight_bytes += bytes_of(*weight);
  // Weights of experts without a row are not read. Rows are assumed to be spread evenly.
  read += weight_bytes / groups * std::min(groups, live);
  work.read_bytes = read;
  work.written_bytes = live * size_of(out, -1) * static_cast<int64_t>(c10::elementSize(out.dtype));
  work.vector_operations = live * product.n * (columns_per_out > 1 ? 10 : 2);
  work.wide = true;
}

}  // namespace vnpu::ops
