#include "ops/random/philox.h"

#include <algorithm>

namespace vnpu::ops {
namespace {

constexpr int kLanes = 4;  // independent chains, so that multiplications overlap
constexpr int kRounds = 10;
constexpr uint32_t kMultiplier0 = 0xD2511F53;  // constants of the definition, here and below
constexpr uint32_t kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9;
constexpr uint32_t kWeyl1 = 0xBB67AE85;

// One row: the four outputs of kLanes counters.
__attribute__((always_inline)) inline void philox_row(uint64_t seed, uint64_t offset, int64_t row,
                                                      uint32_t* __restrict words) {
  uint32_t a[kLanes], b[kLanes], c[kLanes], d[kLanes];
  const uint64_t first = static_cast<uint64_t>(row) * kLanes;  // a row's counters share upper bits
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    a[lane] = static_cast<uint32_t>(first) + lane;
    b[lane] = static_cast<uint32_t>(first >> 32);
    c[lane] = static_cast<uint32_t>(offset);
    d[lane] = static_cast<uint32_t>(offset >> 32);
  }
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t product0 = uint64_t{kMultiplier0} * a[lane];
      const uint64_t product1 = uint64_t{kMultiplier1} * c[lane];
      a[lane] = static_cast<uint32_t>(product1 >> 32) ^ b[lane] ^ key0;
      b[lane] = static_cast<uint32_t>(product1);
      c[lane] = static_cast<uint32_t>(product0 >> 32) ^ d[lane] ^ key1;
      d[lane] = static_cast<uint32_t>(product0);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    words[lane] = a[lane];
    words[kLanes + lane] = b[lane];
    words[2 * kLanes + lane] = c[lane];
    words[3 * kLanes + lane] = d[lane];
  }
}

void convert(const uint32_t* words, int bits, float* values) {
  const int shift = 32 - bits;
  const float scale = 1.0f / static_cast<float>(1u << bits);
  for (int64_t i = 0; i < kPhiloxRow; ++i) {
    // Signed, because few processors convert unsigned integers in vectors.
    values[i] = static_cast<float>(static_cast<int32_t>(words[i] >> shift)) * scale;
  }
}

}  // namespace

void philox_words(uint64_t seed, uint64_t offset, int64_t first_row, int64_t count,
                  uint32_t* words) {
  const int64_t last_row = first_row + count / kPhiloxRow;
  for (int64_t row = first_row; row < last_row; ++row) {
    philox_row(seed, offset, row, words);
    words += kPhiloxRow;
  }
  uint32_t rest[kPhiloxRow];
  philox_row(seed, offset, last_row, rest);
  std::copy_n(rest, count % kPhiloxRow, words);
}

void philox_floats(uint64_t seed, uint64_t offset, int64_t first_row, int64_t count, int bits,
                   float* values) {
  const int64_t last_row = first_row + count / kPhiloxRow;
  for (int64_t row = first_row; row < last_row; ++row) {
    uint32_t words[kPhiloxRow];
    philox_row(seed, offset, row, words);
    convert(words, bits, values);
    values += kPhiloxRow;
  }
  uint32_t words[kPhiloxRow];
  float rest[kPhiloxRow];
  philox_row(seed, offset, last_row, words);
  convert(words, bits, rest);
  std::copy_n(rest, count % kPhiloxRow, values);
}

}  // namespace vnpu::ops
