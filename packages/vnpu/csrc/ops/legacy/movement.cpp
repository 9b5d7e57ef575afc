// Legacy operators that make and move elements.

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
}  // namespace
}  // namespace vnpu::ops
