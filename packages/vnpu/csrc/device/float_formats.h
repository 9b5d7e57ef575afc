#pragma once

// Storage formats of elements, and the types in which they are computed. The conversions have no
// branches, so that the loops over them are vectorized.

#include <bit>
#include <cstdint>

namespace vnpu {

template <class T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static Wide widen(Stored value) { return value; }
  static Stored narrow(Wide value) { return value; }
  static Wide rounded(Wide value) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide widen(Stored value) { return std::bit_cast<float>(uint32_t{value} << 16); }
  static Stored narrow(Wide value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Stored>(value != value ? 0x7fc0u : nearest);
  }
  static Wide rounded(Wide value) { return widen(narrow(value)); }
};

struct Float16 {
  using Stored = uint16_t;
  using Wide = float;
  static Wide widen(Stored value) {
    // Exponents differ by 112; the multiplication also makes normal numbers of subnormal ones.
    const uint32_t magnitude = (uint32_t{value} & 0x7fffu) << 13;
    const auto scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const uint32_t special = (value & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // inf, NaN
    return std::bit_cast<float>(scaled | special | (uint32_t{value} & 0x8000u) << 16);
  }
  static Stored narrow(Wide value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal results: drop 13 bits of the mantissa, to nearest even.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal results: next to 0.5, float32 has exactly their spacing of 2^-24.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and more round to infinity
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return static_cast<Stored>(sign | result);
  }
  static Wide rounded(Wide value) { return widen(narrow(value)); }
};

}  // namespace vnpu
