#pragma once

// Random numbers. Each launch brings a seed and an offset from torch_npu's generator; the numbers
// are a function of these two and of how many there are (philox.h).

#include "ops/operator.h"

namespace vnpu::ops {

struct RandomSource {
  uint64_t seed;
  uint64_t offset;
};
RandomSource random_source(int64_t seed, int64_t offset);
// Tensors of one element. more: added to the offset
RandomSource random_source(const Tensor& seed, const Tensor& offset, int64_t more);

// Uniform in [0, 1) with `bits` random bits, fp32.
void write_uniform_floats(float* values, int64_t count, RandomSource from, int bits);
Tensor uniform_floats(int64_t count, RandomSource from, int bits = 24);
// Uniform in [0, 1) with 53 random bits, fp64.
Tensor uniform_doubles(int64_t count, RandomSource from);
// Uniform in [0, 1) with as many random bits as the dtype's significand holds, so that casts do not
// round up to 1.
Tensor uniform_numbers(int64_t count, RandomSource from, ScalarType type);
// 64 random bits per element, int64.
Tensor random_bits(int64_t count, RandomSource from);
// Standard normal, fp64 for kDouble, else fp32; so are exponential ones.
Tensor normal_numbers(int64_t count, RandomSource from, ScalarType type);
// With rate 1, never zero.
Tensor exponential_numbers(int64_t count, RandomSource from, ScalarType type);

}  // namespace vnpu::ops
