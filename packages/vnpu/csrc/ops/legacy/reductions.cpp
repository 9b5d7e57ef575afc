// Legacy reductions, norms and sorting.

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
const bool reduced_product = legacy("ReduceProd", [](const LegacyArguments& a) -> Results {
  Tensor result = widen(a[0]);
  for (const int64_t dim : dimensions(a)) result = at::prod(result, dim, true);
  return {result.reshape(a.output_sizes())};
});
VNPU_LEGACY(log_sum, "ReduceLogSumExp", at::logsumexp(widen(a[0]), dimensions(a), keeps(a)));

// Spread around a mean that is given; correction: what is subtracted from the number of entries.
Tensor variance(const LegacyArguments& a) {
  std::vector<int64_t> dims = a.integers("dim");
  if (dims.empty()) {
    for (int64_t i = 0; i < a[0].dim(); ++i) dims.push_back(i);
  }
  const bool is_unbiased = a.flag("unbiased", true);
  const int64_t correction = a.integer("correction", is_unbiased ? 1 : 0);
  int64_t entries = 1;
  for (const int64_t dim : dims) entries *= a[0].size(dim);
  const Tensor apart = widen(a[0]) - widen(a[1]);
  return at::sum(apart * apart, dims, a.flag("keepdim")) /
         static_cast<double>(std::max<int64_t>(entries - correction, 0));
}
const bool deviation = legacy("ReduceStdWithMean", [](const LegacyArguments& a) -> Results {
  const double epsilon = a.real("epsilon", 0.001);
  return {a.flag("invert") ? at::rsqrt(variance(a) + epsilon) : at::sqrt(variance(a))};
});
VNPU_LEGACY(spread, "ReduceStdV2Update", a.flag("if_std") ? at::sqrt(variance(a)) : variance(a));

VNPU_LEGACY(argmax, "ArgMaxV2", at::argmax(a[0], a.number(1), keeps(a)));
VNPU_LEGACY(argmin, "ArgMin", at::argmin(a[0], a.number(1), keeps(a)));
const bool max_with_index = legacy("ArgMaxWithValue", [](const LegacyArguments& a) -> Results {
  const auto [values, indices] = at::max(a[0], a.integer("dimension", 0), keeps(a));
  return {indices, values};
});
const bool min_with_index = legacy("ArgMinWithValue", [](const LegacyArguments& a) -> Results {
  const auto [values, indices] = at::min(a[0], a.integer("dimension", 0), keeps(a));
  return {indices, values};
});
const bool topk = legacy("TopKV2", [](const LegacyArguments& a) -> Results {
  const auto [values, indices] = at::topk(a[0], a.number(1), a.integer("dim", -1),
                                          a.flag("largest", true), a.flag("sorted", true));
  return {values, indices};
});
const bool sort = legacy("Sort", [](const LegacyArguments& a) -> Results {
  const auto [values, indices] =
      at::sort(a[0], /*stable=*/true, a.integer("axis", -1), a.flag("descending"));
  return {values, indices};
});
VNPU_LEGACY(cumsum, "Cumsum", at::cumsum(widen(a[0]), a.number(1)));

const bool softmax = legacy("SoftmaxV2", [](const LegacyArguments& a) -> Results {
  const std::vector<int64_t> axes = a.integers("axes");
  return {at::softmax(widen(a[0]), axes.empty() ? -1 : axes[0])};
});
const bool log_softmax = legacy("LogSoftmaxV2", [](const LegacyArguments& a) -> Results {
  const std::vector<int64_t> axes = a.integers("axes");
  return {at::log_softmax(widen(a[0]), axes.empty() ? -1 : axes[0])};
});
const bool layer_norm = legacy("LayerNorm", [](const LegacyArguments& a) -> Results {
  a.pass_over({"begin_params_axis"});  // weights have the sizes of what is normalised
  const Tensor x = widen(a[0]);
  std::vector<int64_t> dims;
  for (int64_t i = a.integer("begin_norm_axis", 0); i < x.dim(); ++i) dims.push_back(i);
  const Tensor centre = at::mean(x, dims, true);
  const Tensor spread = at::mean(at::square(x - centre), dims, true);
  const Tensor normal = (x - centre) * at::rsqrt(spread + a.real("epsilon", 1e-7));
  return {normal * widen(a[1]) + widen(a[2]), centre, spread};
});

// sum: what is normalised
Results rms_norm(const Tensor& sum, const Tensor& gamma, double epsilon) {
  std::vector<int64_t> dims;
  for (int64_t i = 1; i <= gamma.dim(); ++i) dims.push_back(-i);
  const Tensor factor = at::rsqrt(at::mean(at::square(sum), dims, true) + epsilon);
  return {sum * factor * widen(gamma), factor};
}
const bool rms = legacy("RmsNorm", [](const LegacyArguments& a) {
  return rms_norm(widen(a[0]), a[1], a.real("epsilon", 1e-6));
});
const bool add_rms = legacy("AddRmsNorm", [](const LegacyArguments& a) -> Results {
  const Tensor sum = at::add(a[0], a[1]);  // rounded, as the next layer sees it
  Results results = rms_norm(widen(sum), a[2], a.real("epsilon", 1e-6));
  results.push_back(sum);
  return results;
});

}  // namespace
}  // namespace vnpu::ops
