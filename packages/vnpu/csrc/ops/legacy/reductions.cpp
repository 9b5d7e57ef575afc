// Legacy reductions.

#include "ops/legacy/legacy_operator.h"

namespace vnpu::ops {
namespace {

// The dimensions of input 1; none are all.
std::vector<int64_t> dimensions(const LegacyArguments& a) {
  std::vector<int64_t> dims = a.has(1) ? a.numbers(1) : std::vector<int64_t>{};
  if (dims.empty()) {
    for (int64_t i = 0; i < a[0].dim(); ++i) dims.push_back(i);
  }
  return dims;
}
bool keeps(const LegacyArguments& a) { return a.flag("keep_dims"); }

VNPU_LEGACY(sum, "ReduceSum", at::sum(widen(a[0]), dimensions(a), keeps(a)));
VNPU_LEGACY(mean, "ReduceMean", at::mean(widen(a[0]), dimensions(a), keeps(a)));
VNPU_LEGACY(mean_of_attribute, "ReduceMeanD", at::mean(widen(a[0]), a.integers("axes"), keeps(a)));
VNPU_LEGACY(max, "ReduceMax", at::amax(a[0], dimensions(a), keeps(a)));
VNPU_LEGACY(min, "ReduceMin", at::amin(a[0], dimensions(a), keeps(a)));
VNPU_LEGACY(any, "ReduceAny", at::any(a[0], dimensions(a), keeps(a)));
VNPU_LEGACY(all, "ReduceAll", at::all(a[0], dimensions(a), keeps(a)));

}  // namespace
}  // namespace vnpu::ops
