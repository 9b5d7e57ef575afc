#include "collective/reduction.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#include "device/failure.h"

namespace vnpu {
namespace {

constexpr size_t kBlock = 1024;  // elements; the accumulators of a block stay in the first cache

// How elements are stored and in which type they are combined. The conversions have no branches, so
// that the loops over them become vector code.
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

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <class T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};

struct Maximum {
  template <class T>
  static T apply(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

struct Minimum {
  template <class T>
  static T apply(T a, T b) {
    return a < b || a != a ? a : b;
  }
};

template <class Format, class Operation>
void combine(std::span<const std::byte* const> inputs, std::byte* output, size_t count) {
  using Stored = typename Format::Stored;
  typename Format::Wide accumulated[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    const auto* first = reinterpret_cast<const Stored*>(inputs[0]) + begin;
    for (size_t i = 0; i < n; ++i) accumulated[i] = Format::widen(first[i]);
    for (size_t k = 1; k < inputs.size(); ++k) {
      const auto* next = reinterpret_cast<const Stored*>(inputs[k]) + begin;
      for (size_t i = 0; i < n; ++i) {
        accumulated[i] = Operation::apply(accumulated[i], Format::widen(next[i]));
      }
      if (k + 1 == inputs.size()) break;
      for (size_t i = 0; i < n; ++i) accumulated[i] = Format::rounded(accumulated[i]);
    }
    auto* target = reinterpret_cast<Stored*>(output) + begin;
    for (size_t i = 0; i < n; ++i) target[i] = Format::narrow(accumulated[i]);
  }
}

template <class Format>
void combine(Reduction reduction, std::span<const std::byte* const> inputs, std::byte* output,
             size_t count) {
  switch (reduction) {
    case Reduction::kSum: return combine<Format, Sum>(inputs, output, count);
    case Reduction::kProduct: return combine<Format, Product>(inputs, output, count);
    case Reduction::kMaximum: return combine<Format, Maximum>(inputs, output, count);
    case Reduction::kMinimum: return combine<Format, Minimum>(inputs, output, count);
  }
}

}  // namespace

void reduce(ElementType type, Reduction reduction, std::span<const std::byte* const> inputs,
            std::byte* output, size_t count) {
  switch (type) {
    case ElementType::kInt8: return combine<Plain<int8_t>>(reduction, inputs, output, count);
    case ElementType::kInt16: return combine<Plain<int16_t>>(reduction, inputs, output, count);
    case ElementType::kInt32: return combine<Plain<int32_t>>(reduction, inputs, output, count);
    case ElementType::kInt64: return combine<Plain<int64_t>>(reduction, inputs, output, count);
    case ElementType::kUint8: return combine<Plain<uint8_t>>(reduction, inputs, output, count);
    case ElementType::kUint16: return combine<Plain<uint16_t>>(reduction, inputs, output, count);
    case ElementType::kUint32: return combine<Plain<uint32_t>>(reduction, inputs, output, count);
    case ElementType::kUint64: return combine<Plain<uint64_t>>(reduction, inputs, output, count);
    case ElementType::kFloat16: return combine<Float16>(reduction, inputs, output, count);
    case ElementType::kBfloat16: return combine<Bfloat16>(reduction, inputs, output, count);
    case ElementType::kFloat32: return combine<Plain<float>>(reduction, inputs, output, count);
    case ElementType::kFloat64: return combine<Plain<double>>(reduction, inputs, output, count);
    case ElementType::kInt128:
    case ElementType::kHifloat8:
    case ElementType::kFloat8E4m3:
    case ElementType::kFloat8E5m2:
    case ElementType::kFloat8E8m0: break;
  }
  throw Failure(FailureKind::kNotSupported, std::string("vnpu: collectives cannot reduce ") +
                                                name_of(type) +
                                                "; convert to float16, bfloat16 or float32 first.");
}

}  // namespace vnpu
