#include "ops/random/random_numbers.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "ops/random/philox.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kRowsPerTask = 1024;  // of work given to one thread

// Splits `count` words among threads: fill(first row, first word, number of words).
template <class Fill>
void in_rows(int64_t count, Fill fill) {
  const int64_t rows = (count + kPhiloxRow - 1) / kPhiloxRow;
  at::parallel_for(0, rows, kRowsPerTask, [&](int64_t first, int64_t last) {
    const int64_t begin = first * kPhiloxRow;
    fill(first, begin, std::min(last * kPhiloxRow, count) - begin);
  });
}

}  // namespace

RandomSource random_source(int64_t seed, int64_t offset) {
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)};
}

RandomSource random_source(const Tensor& seed, const Tensor& offset, int64_t more) {
  require(seed.numel() == 1 && offset.numel() == 1, "seed and offset must have one element.");
  return random_source(seed.item<int64_t>(), offset.item<int64_t>() + more);
}

void write_uniform_floats(float* values, int64_t count, RandomSource from, int bits) {
  in_rows(count, [&](int64_t row, int64_t begin, int64_t n) {
    philox_floats(from.seed, from.offset, row, n, bits, values + begin);
  });
}

Tensor uniform_floats(int64_t count, RandomSource from, int bits) {
  const Tensor values = at::empty({count}, at::kFloat);
  write_uniform_floats(values.mutable_data_ptr<float>(), count, from, bits);
  return values;
}

Tensor random_bits(int64_t count, RandomSource from) {
  const Tensor words = at::empty({count}, at::kLong);
  auto* const data = reinterpret_cast<uint32_t*>(words.mutable_data_ptr<int64_t>());
  in_rows(2 * count, [&](int64_t row, int64_t begin, int64_t n) {
    philox_words(from.seed, from.offset, row, n, data + begin);
  });
  return words;
}

Tensor uniform_doubles(int64_t count, RandomSource from) {
  const Tensor bits = random_bits(count, from).__irshift__(11).bitwise_and_((int64_t{1} << 53) - 1);
  return bits.to(at::kDouble).mul_(0x1p-53);
}

Tensor uniform_numbers(int64_t count, RandomSource from, ScalarType type) {
  switch (type) {
    case at::kDouble: return uniform_doubles(count, from);
    case at::kHalf: return uniform_floats(count, from, 11);
    case at::kBFloat16: return uniform_floats(count, from, 8);
    default: return uniform_floats(count, from);
  }
}

Tensor normal_numbers(int64_t count, RandomSource from, ScalarType type) {
  // Box and Muller 1958: two of each pair of uniform numbers.
  const int64_t pairs = (count + 1) / 2;
  const Tensor u =
      type == at::kDouble ? uniform_doubles(2 * pairs, from) : uniform_floats(2 * pairs, from);
  const Tensor radius = u.narrow(0, 0, pairs).neg().log1p_().mul_(-2).sqrt_();
  const Tensor angle = u.narrow(0, pairs, pairs).mul(2 * M_PI);
  return at::cat({radius * angle.cos(), radius * angle.sin()}).narrow(0, 0, count);
}

Tensor exponential_numbers(int64_t count, RandomSource from, ScalarType type) {
  const Tensor u = type == at::kDouble ? uniform_doubles(count, from) : uniform_floats(count, from);
  return u.neg_().log1p_().neg_().clamp_min_(0x1p-26);
}

}  // namespace vnpu::ops
