// Updates in place: of a dense cache or any other tensor, at the indices that a tensor holds.

#include <string>
#include <vector>

#include "ops/attention/kv_cache.h"

namespace vnpu::ops {
namespace {

// Writes updates[i] into target(i) along `axis`, which counts the dimensions of updates; indices
// are [batch] (first position) or [batch, 2] (first position, number of positions to write).
template <class Target>
void write_ranges(const Tensor& indices, const Tensor& updates, int64_t axis, Target&& target) {
  if (updates.numel() == 0) return;
  const int64_t dimension = at::maybe_wrap_dim(axis, updates.dim()) - 1;
  require(dimension >= 0, "axis must not be the batch dimension of updates.");
  const std::vector<int64_t> values = host_values(indices);
  const bool with_length = indices.dim() == 2;
  for (int64_t i = 0; i < updates.size(0); ++i) {
    const Tensor update = updates[i];
    const int64_t start = with_length ? values[2 * i] : values[i];
    const int64_t length = with_length ? values[2 * i + 1] : update.size(dimension);
    const OptionalTensor into = target(i);
    if (!into) continue;
    if (start < 0 || length > update.size(dimension) || start + length > into->size(dimension)) {
      refuse("positions " + std::to_string(start) + " to " + std::to_string(start + length) +
             " do not fit a dimension of size " + std::to_string(into->size(dimension)) + ".");
    }
    into->narrow(dimension, start, length).copy_(update.narrow(dimension, 0, length));
  }
}

void quantize_into(const InOut& self, const Tensor& indices, const Tensor& updates,
                   const Tensor& scales, const OptionalTensor& zero_points, int64_t axis,
                   int64_t quant_axis) {
  require(at::maybe_wrap_dim(quant_axis, updates.dim()) == updates.dim() - 1,
          "quantAxis must be the last dimension of updates.");
  Tensor wide = updates.to(at::kFloat) / scales.to(at::kFloat).reshape({-1});
  if (zero_points) wide = wide + zero_points->to(at::kFloat).reshape({-1});
  const Tensor rounded = wide.round().clamp(-128, 127).to(at::kChar);
  write_ranges(indices, rounded, axis, [&](int64_t i) { return OptionalTensor(self.tensor[i]); });
}

}  // namespace

static void cost_of_inplace_quant_scatter(const Call& call, Work& work) {
  const TensorView& updates = call.tensor("updates");
  write_part(work, bytes_of(updates), 2 * updates.numel());
}
VNPU_OPERATOR(ScatterNdUpdate, (InOut self, const Tensor& indices, const Tensor& updates),
              {.tier = kT2,
               .cost = cost_of_inplace_quant_scatter,
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

VNPU_OPERATOR(ScatterList,
              (const InOutList& self, const Tensor& indices, const Tensor& updates,
               const OptionalTensor& mask, const Text& reduce, int64_t axis),
              {.tier = kT2, .cost = cost_of_inplace_quant_scatter}) {
  if (!reduce.empty() && reduce != "update") {
    refuse("reduce '" + reduce + "' is not known; the device only has 'update'.");
  }
  if (static_cast<int64_t>(self.size()) != updates.size(0)) {
    refuse("the list has " + std::to_string(self.size()) + " tensors, updates " +
           std::to_string(updates.size(0)) + " rows.");
  }
  const std::vector<int64_t> wanted = mask ? host_values(*mask) : std::vector<int64_t>();
  write_ranges(indices, updates, axis, [&](int64_t i) {
    return wanted.empty() || wanted[static_cast<size_t>(i)] != 0
               ? OptionalTensor(self[static_cast<size_t>(i)])
               : OptionalTensor();
  });
}

VNPU_OPERATOR(InplaceQuantScatter,
              (InOut self, const Tensor& indices, const Tensor& updates, const Tensor& scales,
               const OptionalTensor& zero_points, int64_t axis, int64_t quant_axis, int64_t),
              {.tier = kT2, .cost = cost_of_inplace_quant_scatter}) {
  quantize_into(self, indices, updates, scales, zero_points, axis, quant_axis);
}

VNPU_OPERATOR(InplaceQuantScatterV2,
              (InOut self, const Tensor& indices, const Tensor& updates, const Tensor& scales,
               const OptionalTensor& zero_points, int64_t axis, int64_t quant_axis, int64_t,
               const Text& round_mode),
              {.tier = kT2, .cost = cost_of_inplace_quant_scatter}) {
  if (!round_mode.empty() && round_mode != "rint") {
    refuse("roundMode '" + round_mode + "' is not supported; use rint.");
  }
  quantize_into(self, indices, updates, scales, zero_points, axis, quant_axis);
}

}  // namespace vnpu::ops
