#include "ops/float_rows.h"

#include <bit>
#include <cstring>

// One body, compiled for several instruction sets; the loader picks the widest that the CPU has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VNPU_VECTORISED \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define VNPU_VECTORISED
#endif

namespace vnpu::ops::float_rows {
namespace {

constexpr int kLanes = 32;  // independent partial sums, so that a sum need not run in order

// exp(x) to within 2 units in the last place: 2^k * e^r with |r| <= ln(2) / 2. A plain expression,
// so that the compiler can vectorise the loop around it.
inline float exponential(float x) {
  // Beyond these the result is 0 or infinity in float32.
  const float raised = x < -104.0f ? -104.0f : x;
  const float clamped = raised > 89.0f ? 89.0f : raised;
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
  const float k = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  float r = clamped - k * 0.693359375f;
  r = r + k * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // Two factors, as 2^k itself leaves float32's range at both ends.
  const auto half = static_cast<int32_t>(k) / 2;
  const auto rest = static_cast<int32_t>(k) - half;
  return p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((rest + 127) << 23);
}

inline uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = 0x7FC0u;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

}  // namespace

void load(const float* row, float* out, int64_t count) {
  std::memcpy(out, row, static_cast<size_t>(count) * sizeof(float));
}
VNPU_VECTORISED void load(const at::BFloat16* row, float* out, int64_t count) {
  const auto* bits = reinterpret_cast<const uint16_t*>(row);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
  }
}
void load(const at::Half* row, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = row[i];
}

void store(const float* row, float* out, int64_t count) {
  std::memcpy(out, row, static_cast<size_t>(count) * sizeof(float));
}
VNPU_VECTORISED void store(const float* row, at::BFloat16* out, int64_t count) {
  auto* bits = reinterpret_cast<uint16_t*>(out);
  for (int64_t i = 0; i < count; ++i) bits[i] = to_bfloat16(row[i]);
}
void store(const float* row, at::Half* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = row[i];
}

VNPU_VECTORISED void add(const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

VNPU_VECTORISED void multiply(const float* row, float factor, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = row[i] * factor;
}

VNPU_VECTORISED float sum_of_squares(const float* row, int64_t count) {
  float partial[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) partial[lane] += row[i + lane] * row[i + lane];
  }
  for (int lane = 0; i < count; ++i, ++lane) partial[lane] += row[i] * row[i];
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) partial[lane] += partial[lane + width];
  }
  return partial[0];
}

VNPU_VECTORISED int64_t argmax(const float* row, int64_t count) {
  constexpr int64_t kBlock = 256;
  if (count == 0) return -1;
  float greatest[kLanes];
  int32_t is_nan[kLanes] = {};
  for (float& lane : greatest) lane = row[0];
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = row[i + lane];
      greatest[lane] = value > greatest[lane] ? value : greatest[lane];
      is_nan[lane] |= value != value;
    }
  }
  float most = row[0];
  int32_t any_nan = 0;
  for (int64_t i = whole; i < count; ++i) {
    most = row[i] > most ? row[i] : most;
    any_nan |= row[i] != row[i];
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    most = greatest[lane] > most ? greatest[lane] : most;
    any_nan |= is_nan[lane];
  }
  if (any_nan != 0) return -1;
  // A block at a time: a loop that may end at every element is not vectorised.
  int64_t first = 0;
  for (; first + kBlock <= count; first += kBlock) {
    int32_t found = 0;
    for (int64_t i = first; i < first + kBlock; ++i) found |= row[i] == most;
    if (found != 0) break;
  }
  while (row[first] != most) ++first;
  return first;
}
VNPU_VECTORISED void scale(const float* row, float factor, const float* weight, float* out,
                           int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = row[i] * factor * weight[i];
}

VNPU_VECTORISED void silu_multiply(const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float gate = a[i];
    out[i] = gate / (1.0f + exponential(-gate)) * b[i];
  }
}

}  // namespace vnpu::ops::float_rows
