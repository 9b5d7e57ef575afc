// Tensors of random numbers, by distribution. The forms with tensors serve captured graphs: seed
// and offset are read when the launch runs.

#include <bit>
#include <string>
#include <vector>

#include "ops/operator.h"
#include "ops/random/random_numbers.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

void fill_uniform(const Tensor& self, double low, double high, RandomSource from) {
  require(at::isFloatingType(self.scalar_type()), "uniform numbers need a floating-point tensor.");
  require(low <= high, "`from` is above `to`.");
  if (low == 0 && high == 1 && self.scalar_type() == at::kFloat && self.is_contiguous()) {
    // Straight into place: the first step of every sampled token.
    write_uniform_floats(self.mutable_data_ptr<float>(), self.numel(), from, 24);
    return;
  }
  Tensor values = uniform_numbers(self.numel(), from, self.scalar_type());
  if (low != 0 || high != 1) values.mul_(high - low).add_(low);
  store(self, values.view(self.sizes()));
}

void fill_normal(const Tensor& self, double mean, double std, RandomSource from) {
  require(std >= 0, "the standard deviation is negative.");
  const Tensor values = normal_numbers(self.numel(), from, self.scalar_type());
  store(self, values.mul_(std).add_(mean).view(self.sizes()));
}

void fill_normal(const Tensor& out, const Tensor& mean, const Tensor& std, RandomSource from) {
  const Tensor values = normal_numbers(out.numel(), from, out.scalar_type()).view(out.sizes());
  store(out, values.mul_(std).add_(mean));
}

void fill_integers(const Tensor& self, int64_t low, int64_t high, RandomSource from) {
  require(low < high, "`from` must lie below `to`.");
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  Tensor values = random_bits(self.numel(), from);
  auto* const data = reinterpret_cast<uint64_t*>(values.mutable_data_ptr<int64_t>());
  // The bias of the remainder is below range / 2^64.
  for (int64_t i = 0; i < values.numel(); ++i)
    data[i] = static_cast<uint64_t>(low) + data[i] % range;
  store(self, values.view(self.sizes()));
}

void fill_bernoulli(const Tensor& self, const Tensor& probability, RandomSource from) {
  const Tensor u = uniform_doubles(self.numel(), from).view(self.sizes());
  store(self, u < probability);
}

// Draws classes along the last dimension, weighted by `weights` (1-D or 2-D, not normalised).
Tensor multinomial(const Tensor& weights, int64_t count, bool replacement, RandomSource from) {
  require(weights.dim() == 1 || weights.dim() == 2, "the weights must have one or two dimensions.");
  require(count > 0, "numsamples must be positive.");
  const int64_t classes = weights.size(-1);
  if (!replacement && count > classes) {
    refuse("cannot draw " + std::to_string(count) + " of " + std::to_string(classes) +
           " classes without replacement.");
  }
  const Tensor p = weights.to(at::kDouble);
  const Tensor total = p.sum(-1, /*keepdim=*/true);
  if (p.numel() > 0) {
    require(p.ge(0).all().item<bool>() && total.isfinite().all().item<bool>(),
            "the weights contain inf, nan or a negative number.");
    require(total.gt(0).all().item<bool>(), "the weights of a row sum to zero.");
  }
  if (replacement && count > 1) {
    // The first class whose cumulative weight lies above a uniform share of the total.
    std::vector<int64_t> sizes = weights.sizes().vec();
    sizes.back() = count;
    const Tensor u = uniform_doubles(c10::multiply_integers(sizes), from).view(sizes);
    return at::searchsorted(p.cumsum(-1), u * total, /*out_int32=*/false, /*right=*/true);
  }
  // The smallest of exponential variables with these rates, then the next smallest, and so on.
  const Tensor race = p / exponential_numbers(p.numel(), from, at::kDouble).view(p.sizes());
  return count == 1 ? race.argmax(-1, /*keepdim=*/true) : std::get<1>(race.topk(count, -1));
}

}  // namespace

VNPU_OPERATOR(InplaceUniform, (Out self, double from, double to, uint64_t seed, uint64_t offset),
              {.cost = elements<20>,
               .rules = {"DTYPE_SUPPORT_LIST in aclnn_uniform.cpp",
                         {{"self", dtype(kReal), kOnBigChips}}}}) {
  fill_uniform(self.tensor, from, to, {seed, offset});
}
VNPU_OPERATOR(InplaceUniformTensor,
              (Out self, double from, double to, const Tensor& seed, const Tensor& offset,
               uint64_t more),
              {.cost = elements<20>}) {
  fill_uniform(self.tensor, from, to, random_source(seed, offset, std::bit_cast<int64_t>(more)));
}
VNPU_OPERATOR(InplaceNormal, (Out self, float mean, float std, int64_t seed, int64_t offset),
              {.cost = elements<20>,
               .rules = {"DTYPE_SUPPORT_LIST in aclnn_normal.cpp",
                         {{"self", dtype(kRealAndBool), kOnBigChips}}}}) {
  fill_normal(self.tensor, mean, std, random_source(seed, offset));
}
VNPU_OPERATOR(InplaceNormalTensor,
              (Out self, float mean, float std, const Tensor& seed, const Tensor& offset,
               int64_t more),
              {.cost = elements<20>}) {
  fill_normal(self.tensor, mean, std, random_source(seed, offset, more));
}
VNPU_OPERATOR(NormalFloatFloat, (float mean, float std, int64_t seed, int64_t offset, Out out),
              {.cost = elements<20>}) {
  fill_normal(out.tensor, mean, std, random_source(seed, offset));
}
VNPU_OPERATOR(NormalTensorFloat,
              (const Tensor& mean, float std, int64_t seed, int64_t offset, Out out),
              {.cost = elements<20>}) {
  fill_normal(out.tensor, mean, at::scalar_tensor(std), random_source(seed, offset));
}

// Integers in [from, to), in any dtype.
VNPU_OPERATOR(InplaceRandom, (Out self, int64_t from, int64_t to, int64_t seed, int64_t offset),
              {.cost = elements<20>,
               .rules = {
                   "ops-math random/dsa_random_uniform/docs/aclnnInplaceRandom.md, parameters",
                   {{"self", dtype(kNumbers), kOnBigChips}}}}) {
  fill_integers(self.tensor, from, to, random_source(seed, offset));
}
VNPU_OPERATOR(InplaceRandomTensor,
              (Out self, int64_t from, int64_t to, const Tensor& seed, const Tensor& offset,
               int64_t more),
              {.cost = elements<20>}) {
  fill_integers(self.tensor, from, to, random_source(seed, offset, more));
}
VNPU_OPERATOR(Randperm, (int64_t n, int64_t seed, int64_t offset, Out out),
              {.cost = elements_on_ai_cpu<20>}) {
  require(n == out.tensor.numel(), "n differs from the number of elements of the output.");
  store(out, random_bits(n, random_source(seed, offset)).argsort());
}

VNPU_OPERATOR(InplaceBernoulli, (Out self, const Scalar& prob, int64_t seed, int64_t offset),
              {.cost = elements<20>}) {
  const double probability = prob.toDouble();
  require(probability >= 0 && probability <= 1, "prob must lie in [0, 1].");
  fill_bernoulli(self.tensor, at::scalar_tensor(probability, at::kDouble),
                 random_source(seed, offset));
}
// `prob` holds one probability per element.
VNPU_OPERATOR(InplaceBernoulliTensor, (Out self, const Tensor& prob, int64_t seed, int64_t offset),
              {.cost = elements<20>}) {
  fill_bernoulli(self.tensor, prob.to(at::kDouble), random_source(seed, offset));
}

VNPU_OPERATOR(Multinomial,
              (const Tensor& self, int64_t numsamples, bool replacement, int64_t seed,
               int64_t offset, Out out),
              {.cost = elements_on_ai_cpu<20>}) {
  store(out, multinomial(self, numsamples, replacement, random_source(seed, offset)));
}
VNPU_OPERATOR(MultinomialTensor,
              (const Tensor& self, int64_t numsamples, bool replacement, const Tensor& seed,
               const Tensor& offset, int64_t more, Out out),
              {.cost = elements_on_ai_cpu<20>}) {
  store(out, multinomial(self, numsamples, replacement, random_source(seed, offset, more)));
}
VNPU_OPERATOR(SimThreadExponential,
              (Out self, int64_t count, double lambda, int64_t seed, int64_t offset),
              {.cost = elements<20>}) {
  require(count == self.tensor.numel(), "count differs from the number of elements.");
  require(lambda > 0, "lambda must be positive.");
  const Tensor values =
      exponential_numbers(count, random_source(seed, offset), self.tensor.scalar_type());
  store(self, values.div_(lambda).view(self.tensor.sizes()));
}

}  // namespace vnpu::ops
