#include "collective/reduction.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "device/failure.h"
#include "device/float_formats.h"

namespace vnpu {
namespace {

constexpr size_t kBlock = 1024;  // elements; the accumulators of a block stay in the first cache

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
