// Legacy operators that make, move and choose elements.

#include "ops/legacy/legacy_operator.h"

namespace vnpu::ops {
namespace {

// Between layouts, and between dtypes: the machinery's own work.
const bool cast = legacy("Identity TransData Cast", [](const LegacyArguments& a) -> Results {
  a.pass_over({"dst_type", "src_format", "dst_format", "groups"});  // the output has them
  return {a[0]};
});

const bool fill = legacy("Fill", [](const LegacyArguments& a) -> Results {
  return {a[1].reshape({})};  // input 0: the sizes, which the output has too
});
VNPU_LEGACY(zeros, "ZerosLike", at::zeros_like(a[0]));
VNPU_LEGACY(ones, "OnesLike", at::ones_like(a[0]));

VNPU_LEGACY(transpose, "Transpose", a[0].permute(a.numbers(1)));
VNPU_LEGACY(broadcast, "BroadcastTo", a[0].expand(a.numbers(1)));
VNPU_LEGACY(tile, "Tile", a[0].repeat(a.numbers(1)));
const bool concat = legacy("ConcatD", [](const LegacyArguments& a) -> Results {
  a.pass_over({"N"});
  return {at::cat(a.inputs(), a.integer("concat_dim", 0))};
});
const bool pack = legacy("Pack", [](const LegacyArguments& a) -> Results {
  a.pass_over({"N"});
  return {at::stack(a.inputs(), a.integer("axis", 0))};
});
const bool slice = legacy("Slice", [](const LegacyArguments& a) -> Results {
  const std::vector<int64_t> begin = a.numbers(1);
  const std::vector<int64_t> sizes = a.numbers(2);
  Tensor part = a[0];
  for (int64_t i = 0; i < part.dim(); ++i) {
    const auto place = static_cast<size_t>(i);
    part =
        part.narrow(i, begin[place], sizes[place] < 0 ? part.size(i) - begin[place] : sizes[place]);
  }
  return {part};
});
VNPU_LEGACY(as_strided, "AsStrided",
            at::as_strided(a[0].contiguous(), a.numbers(1), a.numbers(2), a.number(3)));
// [target, its sizes, strides, offset, source, its sizes, strides, offset]
const bool view_copy = legacy("ViewCopy", [](const LegacyArguments& a) -> Results {
  const Tensor whole = a[0].clone(at::MemoryFormat::Contiguous);
  const Tensor source = at::as_strided(a[4].contiguous(), a.numbers(5), a.numbers(6), a.number(7));
  at::as_strided(whole, a.numbers(1), a.numbers(2), a.number(3)).copy_(source);
  return {whole};
});
VNPU_LEGACY(reverse, "ReverseV2", at::flip(a[0], a.numbers(1)));
VNPU_LEGACY(roll, "Roll", at::roll(a[0], a.integers("shifts"), a.integers("dims")));
VNPU_LEGACY(tril, "Tril", at::tril(a[0], a.integer("diagonal", 0)));
VNPU_LEGACY(triu, "Triu", at::triu(a[0], a.integer("diagonal", 0)));
// paddings: two numbers for each dimension, from the first on
const bool pad = legacy("PadV3", [](const LegacyArguments& a) -> Results {
  const bool is_constant = a.text("mode", "constant") == "constant";
  require(a.flag("paddings_contiguous", true) && is_constant,
          "only mode 'constant' with paddings side by side is implemented");
  const std::vector<int64_t> given = a.numbers(1);
  std::vector<int64_t> from_last;
  for (size_t i = given.size(); i >= 2; i -= 2) {
    from_last.insert(from_last.end(), {given[i - 2], given[i - 1]});
  }
  const Scalar value = a.has(2) ? a[2].reshape({}).item() : Scalar(0);
  return {at::constant_pad_nd(a[0], from_last, value)};
});

// --- chosen by indices ---------------------------------------------------------------------------

Tensor gather(const Tensor& x, const Tensor& indices, int64_t dim) {
  const int64_t axis = dim < 0 ? dim + x.dim() : dim;
  std::vector<int64_t> sizes = x.sizes().slice(0, axis).vec();
  sizes.insert(sizes.end(), indices.sizes().begin(), indices.sizes().end());
  const auto rest = x.sizes().slice(axis + 1);
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  return x.index_select(axis, indices.reshape(-1)).reshape(sizes);
}
const bool gathers = legacy("GatherV2", [](const LegacyArguments& a) -> Results {
  require(a.integer("batch_dims", 0) == 0, "batch_dims must be 0");
  return {gather(a[0], a[1], a.number(2))};
});
VNPU_LEGACY(gathers_of_attribute, "GatherV2D", gather(a[0], a[1], a.integer("axis", 0)));
VNPU_LEGACY(gathers_elements, "GatherElements",
            at::gather(a[0], a.integer("dim", 0), a[1].to(at::kLong)));
const bool scatters_elements = legacy("ScatterElements", [](const LegacyArguments& a) -> Results {
  const std::string reduction = a.text("reduction", "none");
  const int64_t axis = a.integer("axis", 0);
  const Tensor index = a[1].to(at::kLong);
  if (reduction == "add") return {at::scatter_add(a[0], axis, index, a[2])};
  require(reduction == "none", "only reductions 'none' and 'add' are implemented");
  return {at::scatter(a[0], axis, index, a[2])};
});

// Indices follow the inputs in front of them; masks says which dimensions they are of.
c10::List<std::optional<Tensor>> indices_of(const LegacyArguments& a, size_t masks, size_t first) {
  c10::List<std::optional<Tensor>> all;
  for (const int64_t is_indexed : a.numbers(masks)) {
    all.push_back(is_indexed != 0 ? std::optional<Tensor>(a[first++]) : std::nullopt);
  }
  return all;
}
VNPU_LEGACY(index, "Index", at::index(a[0], indices_of(a, 1, 3)));
VNPU_LEGACY(index_put, "IndexPutV2",
            at::index_put(a[0], indices_of(a, 2, 4), a[1], a.flag("accumulate")));

}  // namespace
}  // namespace vnpu::ops
