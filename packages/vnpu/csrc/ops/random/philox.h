#pragma once

// Philox4x32-10 (Salmon et al. 2011): random words as a pure function of seed, offset and position,
// so that results depend neither on threads nor on what was drawn before.
//
// Words come in rows of 16 from 4 counters: word i of row r is output i / 4 of the counter
// (4 r + i % 4, offset) under the key `seed`. Launches that differ in seed or offset share no
// counter.

#include <cstdint>

namespace vnpu::ops {

constexpr int64_t kPhiloxRow = 16;

// The first `count` words from row `first_row` on.
void philox_words(uint64_t seed, uint64_t offset, int64_t first_row, int64_t count,
                  uint32_t* words);
// The same as floats in [0, 1): the upper `bits` (at most 24) bits of each word.
void philox_floats(uint64_t seed, uint64_t offset, int64_t first_row, int64_t count, int bits,
                   float* values);

}  // namespace vnpu::ops
