// Random numbers. Each launch brings a seed and an offset from torch_npu's generator; what it
// writes is a function of these two and the shape alone (philox.h). The forms with tensors serve
// captured graphs: seed and offset are read when the launch runs.

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "ops/operator.h"
#include "ops/random/philox.h"
#include "ops/reduction/declarations.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kRowsPerTask = 1024;  // of work given to one thread

struct Source {
  uint64_t seed;
  uint64_t offset;
};

Source source(int64_t seed, int64_t offset) {
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)};
}

Source source(const Tensor& seed, const Tensor& offset, int64_t more) {
  require(seed.numel() == 1 && offset.numel() == 1, "seed and offset must have one element.");
  return source(seed.item<int64_t>(), offset.item<int64_t>() + more);
}

// --- raw material -------------------------------------------------------------------------------

// Splits `count` words among threads: fill(first row, first word, number of words).
template <class Fill>
void in_rows(int64_t count, Fill fill) {
  const int64_t rows = (count + kPhiloxRow - 1) / kPhiloxRow;
  at::parallel_for(0, rows, kRowsPerTask, [&](int64_t first, int64_t last) {
    const int64_t begin = first * kPhiloxRow;
    fill(first, begin, std::min(last * kPhiloxRow, count) - begin);
  });
}

void write_uniform_floats(float* values, int64_t count, Source from, int bits) {
  in_rows(count, [&](int64_t row, int64_t begin, int64_t n) {
    philox_floats(from.seed, from.offset, row, n, bits, values + begin);
  });
}

// Uniform in [0, 1) with `bits` random bits, fp32.
Tensor uniform_floats(int64_t count, Source from, int bits = 24) {
  const Tensor values = at::empty({count}, at::kFloat);
  write_uniform_floats(values.mutable_data_ptr<float>(), count, from, bits);
  return values;
}

// 64 random bits per element.
Tensor random_bits(int64_t count, Source from) {
  const Tensor words = at::empty({count}, at::kLong);
  auto* const data = reinterpret_cast<uint32_t*>(words.mutable_data_ptr<int64_t>());
  in_rows(2 * count, [&](int64_t row, int64_t begin, int64_t n) {
    philox_words(from.seed, from.offset, row, n, data + begin);
  });
  return words;
}

// Uniform in [0, 1) with 53 random bits, fp64.
Tensor uniform_doubles(int64_t count, Source from) {
  const Tensor bits = random_bits(count, from).__irshift__(11).bitwise_and_((int64_t{1} << 53) - 1);
  return bits.to(at::kDouble).mul_(0x1p-53);
}

// As many random bits as the dtype's significand holds, so that casts do not round up to 1.
Tensor uniform(int64_t count, Source from, ScalarType type) {
  switch (type) {
    case at::kDouble: return uniform_doubles(count, from);
    case at::kHalf: return uniform_floats(count, from, 11);
    case at::kBFloat16: return uniform_floats(count, from, 8);
    default: return uniform_floats(count, from);
  }
}

// Standard normal (Box and Muller 1958): two of each pair of uniform numbers.
Tensor normal(int64_t count, Source from, ScalarType type) {
  const int64_t pairs = (count + 1) / 2;
  const Tensor u =
      type == at::kDouble ? uniform_doubles(2 * pairs, from) : uniform_floats(2 * pairs, from);
  const Tensor radius = u.narrow(0, 0, pairs).neg().log1p_().mul_(-2).sqrt_();
  const Tensor angle = u.narrow(0, pairs, pairs).mul(2 * M_PI);
  return at::cat({radius * angle.cos(), radius * angle.sin()}).narrow(0, 0, count);
}

// Exponential with rate 1, never zero.
Tensor exponential(int64_t count, Source from, ScalarType type) {
  const Tensor u = type == at::kDouble ? uniform_doubles(count, from) : uniform_floats(count, from);
  return u.neg_().log1p_().neg_().clamp_min_(0x1p-26);
}

// --- distributions ------------------------------------------------------------------------------

void fill_uniform(const Tensor& self, double low, double high, Source from) {
  require(at::isFloatingType(self.scalar_type()), "uniform numbers need a floating-point tensor.");
  require(low <= high, "`from` is above `to`.");
  if (low == 0 && high == 1 && self.scalar_type() == at::kFloat && self.is_contiguous()) {
    // Straight into place: the first step of every sampled token.
    write_uniform_floats(self.mutable_data_ptr<float>(), self.numel(), from, 24);
    return;
  }
  Tensor values = uniform(self.numel(), from, self.scalar_type());
  if (low != 0 || high != 1) values.mul_(high - low).add_(low);
  store(self, values.view(self.sizes()));
}

void fill_normal(const Tensor& self, double mean, double std, Source from) {
  require(std >= 0, "the standard deviation is negative.");
  const Tensor values = normal(self.numel(), from, self.scalar_type());
  store(self, values.mul_(std).add_(mean).view(self.sizes()));
}

void fill_normal(const Tensor& out, const Tensor& mean, const Tensor& std, Source from) {
  const Tensor values = normal(out.numel(), from, out.scalar_type()).view(out.sizes());
  store(out, values.mul_(std).add_(mean));
}

void fill_integers(const Tensor& self, int64_t low, int64_t high, Source from) {
  require(low < high, "`from` must lie below `to`.");
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  Tensor values = random_bits(self.numel(), from);
  auto* const data = reinterpret_cast<uint64_t*>(values.mutable_data_ptr<int64_t>());
  // The bias of the remainder is below range / 2^64.
  for (int64_t i = 0; i < values.numel(); ++i)
    data[i] = static_cast<uint64_t>(low) + data[i] % range;
  store(self, values.view(self.sizes()));
}

void fill_bernoulli(const Tensor& self, const Tensor& probability, Source from) {
  const Tensor u = uniform_doubles(self.numel(), from).view(self.sizes());
  store(self, u < probability);
}

// Draws classes along the last dimension, weighted by `weights` (1-D or 2-D, not normalised).
Tensor multinomial(const Tensor& weights, int64_t count, bool replacement, Source from) {
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
  const Tensor race = p / exponential(p.numel(), from, at::kDouble).view(p.sizes());
  return count == 1 ? race.argmax(-1, /*keepdim=*/true) : std::get<1>(race.topk(count, -1));
}

// Masks of dropout: one bit per element (1 = kept), the lowest first, in bytes padded to 128 bits.
constexpr int64_t kMaskAlignmentBits = 128;

int64_t mask_bytes(int64_t elements) {
  return (elements + kMaskAlignmentBits - 1) / kMaskAlignmentBits * kMaskAlignmentBits / 8;
}

void write_mask(const Tensor& out, const IntArray& shape, double probability, Source from) {
  require(probability >= 0 && probability <= 1, "prob must lie in [0, 1].");
  require(out.scalar_type() == at::kByte, "the mask must be uint8.");
  const int64_t bytes = mask_bytes(c10::multiply_integers(shape));
  if (out.numel() != bytes) {
    refuse("the mask has " + std::to_string(out.numel()) + " bytes; the shape needs " +
           std::to_string(bytes) + ".");
  }
  const Tensor kept =
      uniform_doubles(bytes * 8, from).ge(probability).to(at::kByte).view({bytes, 8});
  const Tensor place = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
  store(out, kept.mul(place).sum(-1, false, at::kByte).view(out.sizes()));
}

}  // namespace

VNPU_OPERATOR(InplaceUniform, (Out self, double from, double to, uint64_t seed, uint64_t offset),
              {.tier = kT1, .cost = elements<20>, .allowed = allowed_inplace_uniform}) {
  fill_uniform(self.tensor, from, to, {seed, offset});
}
VNPU_OPERATOR(InplaceUniformTensor,
              (Out self, double from, double to, const Tensor& seed, const Tensor& offset,
               uint64_t more),
              {.tier = kT1, .cost = elements<20>}) {
  fill_uniform(self.tensor, from, to, source(seed, offset, std::bit_cast<int64_t>(more)));
}
VNPU_OPERATOR(InplaceNormal, (Out self, float mean, float std, int64_t seed, int64_t offset),
              {.tier = kT1, .cost = elements<20>, .allowed = allowed_inplace_normal}) {
  fill_normal(self.tensor, mean, std, source(seed, offset));
}
VNPU_OPERATOR(InplaceNormalTensor,
              (Out self, float mean, float std, const Tensor& seed, const Tensor& offset,
               int64_t more),
              {.tier = kT1, .cost = elements<20>}) {
  fill_normal(self.tensor, mean, std, source(seed, offset, more));
}
VNPU_OPERATOR(NormalFloatFloat, (float mean, float std, int64_t seed, int64_t offset, Out out),
              {.tier = kT1, .cost = elements<20>}) {
  fill_normal(out.tensor, mean, std, source(seed, offset));
}
VNPU_OPERATOR(NormalTensorFloat,
              (const Tensor& mean, float std, int64_t seed, int64_t offset, Out out),
              {.tier = kT1, .cost = elements<20>}) {
  fill_normal(out.tensor, mean, at::scalar_tensor(std), source(seed, offset));
}
VNPU_OPERATOR(NormalFloatTensor,
              (float mean, const Tensor& std, int64_t seed, int64_t offset, Out out),
              {.cost = elements<20>}) {
  fill_normal(out.tensor, at::scalar_tensor(mean), std, source(seed, offset));
}
VNPU_OPERATOR(NormalTensorTensor,
              (const Tensor& mean, const Tensor& std, int64_t seed, int64_t offset, Out out),
              {.cost = elements<20>}) {
  fill_normal(out.tensor, mean, std, source(seed, offset));
}

// Integers in [from, to), in any dtype.
VNPU_OPERATOR(InplaceRandom, (Out self, int64_t from, int64_t to, int64_t seed, int64_t offset),
              {.tier = kT1, .cost = elements<20>}) {
  fill_integers(self.tensor, from, to, source(seed, offset));
}
VNPU_OPERATOR(InplaceRandomTensor,
              (Out self, int64_t from, int64_t to, const Tensor& seed, const Tensor& offset,
               int64_t more),
              {.tier = kT1, .cost = elements<20>}) {
  fill_integers(self.tensor, from, to, source(seed, offset, more));
}
VNPU_OPERATOR(Randperm, (int64_t n, int64_t seed, int64_t offset, Out out),
              {.tier = kT1, .cost = elements_on_ai_cpu<20>}) {
  require(n == out.tensor.numel(), "n differs from the number of elements of the output.");
  store(out, random_bits(n, source(seed, offset)).argsort());
}

VNPU_OPERATOR(InplaceBernoulli, (Out self, const Scalar& prob, int64_t seed, int64_t offset),
              {.tier = kT1, .cost = elements<20>}) {
  const double probability = prob.toDouble();
  require(probability >= 0 && probability <= 1, "prob must lie in [0, 1].");
  fill_bernoulli(self.tensor, at::scalar_tensor(probability, at::kDouble), source(seed, offset));
}
// `prob` holds one probability per element.
VNPU_OPERATOR(InplaceBernoulliTensor, (Out self, const Tensor& prob, int64_t seed, int64_t offset),
              {.tier = kT1, .cost = elements<20>}) {
  fill_bernoulli(self.tensor, prob.to(at::kDouble), source(seed, offset));
}

VNPU_OPERATOR(Multinomial,
              (const Tensor& self, int64_t numsamples, bool replacement, int64_t seed,
               int64_t offset, Out out),
              {.tier = kT1, .cost = elements_on_ai_cpu<20>}) {
  store(out, multinomial(self, numsamples, replacement, source(seed, offset)));
}
VNPU_OPERATOR(MultinomialTensor,
              (const Tensor& self, int64_t numsamples, bool replacement, const Tensor& seed,
               const Tensor& offset, int64_t more, Out out),
              {.tier = kT1, .cost = elements_on_ai_cpu<20>}) {
  store(out, multinomial(self, numsamples, replacement, source(seed, offset, more)));
}
VNPU_OPERATOR(SimThreadExponential,
              (Out self, int64_t count, double lambda, int64_t seed, int64_t offset),
              {.tier = kT1, .cost = elements<20>}) {
  require(count == self.tensor.numel(), "count differs from the number of elements.");
  require(lambda > 0, "lambda must be positive.");
  const Tensor values = exponential(count, source(seed, offset), self.tensor.scalar_type());
  store(self, values.div_(lambda).view(self.tensor.sizes()));
}

VNPU_OPERATOR(DropoutGenMask,
              (const IntArray& shape, double prob, int64_t seed, int64_t offset, Out out),
              {.tier = kT1, .cost = elements<20>}) {
  write_mask(out.tensor, shape, prob, source(seed, offset));
}
// The dtype of the tensor that is masked does not change the mask.
VNPU_OPERATOR(DropoutGenMaskV2,
              (const IntArray& shape, double prob, int64_t seed, int64_t offset, DType, Out out),
              {.tier = kT1, .cost = elements<20>}) {
  write_mask(out.tensor, shape, prob, source(seed, offset));
}
// What is kept grows by 1 / (1 - prob).
VNPU_OPERATOR(DropoutDoMask, (const Tensor& self, const Tensor& mask, double prob, Out out),
              {.tier = kT1, .cost = elements<20>}) {
  require(prob >= 0 && prob <= 1, "prob must lie in [0, 1].");
  require(mask.numel() >= mask_bytes(self.numel()), "the mask is shorter than the tensor.");
  const Tensor place = at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte);
  const Tensor bits = mask.reshape({-1, 1}).bitwise_and(place).ne(0).flatten();
  const Tensor kept = bits.narrow(0, 0, self.numel()).view(self.sizes());
  const double scale = prob == 1 ? 0 : 1 / (1 - prob);
  store(out, at::where(kept, self * scale, at::zeros({}, self.options())));
}

}  // namespace vnpu::ops
