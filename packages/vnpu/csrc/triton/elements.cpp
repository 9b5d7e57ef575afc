#include "triton/elements.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "device/failure.h"
#include "device/float_formats.h"

namespace vnpu::triton {
namespace {

[[noreturn]] void refuse(Operation operation, Type type) {
  throw Failure(FailureKind::kNotSupported,
                "vnpu: " + operation_names()[static_cast<size_t>(operation)] +
                    " has no arithmetic on elements of type " +
                    std::to_string(static_cast<int>(type)) + ".");
}

template <class Use>
bool visit_int(Type type, Use use) {
  switch (type) {
    case Type::kInt1:
    case Type::kInt8: use(int8_t{}); return true;
    case Type::kInt16: use(int16_t{}); return true;
    case Type::kInt32: use(int32_t{}); return true;
    case Type::kInt64:
    case Type::kPointer: use(int64_t{}); return true;
    default: return false;
  }
}

template <class Use>
bool visit_float(Type type, Use use) {
  switch (type) {
    case Type::kFloat16: use(Float16{}); return true;
    case Type::kBfloat16: use(Bfloat16{}); return true;
    case Type::kFloat32: use(Plain<float>{}); return true;
    case Type::kFloat64: use(Plain<double>{}); return true;
    default: return false;
  }
}

template <class T>
const T* as(const Operand& operand) {
  return reinterpret_cast<const T*>(operand.data);
}

// --- integers ------------------------------------------------------------------------------------

template <class T, class F>
void each(std::byte* out, const Operand* in, size_t count, F f) {
  auto* const to = reinterpret_cast<T*>(out);
  const T* const a = as<T>(in[0]);
  const T* const b = as<T>(in[1]);
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(f(a[i], b[i]));
}

template <class T>
T divide(T a, T b) {
  if (b == 0) return 0;
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return static_cast<T>(-static_cast<std::make_unsigned_t<T>>(a));
  }
  return static_cast<T>(a / b);
}

template <class T>
T remainder(T a, T b) {
  if (b == 0) return 0;
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return 0;
  }
  return static_cast<T>(a % b);
}

template <class T>
void integers(Operation operation, std::byte* out, const Operand* in, size_t n) {
  using U = std::make_unsigned_t<T>;
  constexpr U kBits = sizeof(T) * 8;
#define VNPU_INTEGERS(OPERATION, TYPE, EXPRESSION) \
  case Operation::OPERATION:                       \
    return each<TYPE>(out, in, n, [](TYPE a, TYPE b) { return EXPRESSION; });
  switch (operation) {
    VNPU_INTEGERS(kAddInt, U, a + b)
    VNPU_INTEGERS(kSubInt, U, a - b)
    VNPU_INTEGERS(kMulInt, U, static_cast<U>(uint64_t{a} * b))
    VNPU_INTEGERS(kAnd, U, a & b)
    VNPU_INTEGERS(kOr, U, a | b)
    VNPU_INTEGERS(kXor, U, a ^ b)
    VNPU_INTEGERS(kShiftLeft, U, b < kBits ? uint64_t{a} << b : 0)
    VNPU_INTEGERS(kShiftRight, U, b < kBits ? uint64_t{a} >> b : 0)
    VNPU_INTEGERS(kShiftRightSigned, T,
                  int64_t{a} >> std::min<uint64_t>(static_cast<U>(b), kBits - 1))
    VNPU_INTEGERS(kDivInt, T, divide<T>(a, b))
    VNPU_INTEGERS(kDivUint, U, divide<U>(a, b))
    VNPU_INTEGERS(kRemInt, T, remainder<T>(a, b))
    VNPU_INTEGERS(kRemUint, U, remainder<U>(a, b))
    VNPU_INTEGERS(kMaxInt, T, a > b ? a : b)
    VNPU_INTEGERS(kMinInt, T, a < b ? a : b)
    VNPU_INTEGERS(kMaxUint, U, a > b ? a : b)
    VNPU_INTEGERS(kMinUint, U, a < b ? a : b)
    VNPU_INTEGERS(kMulHighUint, U, static_cast<U>((static_cast<unsigned __int128>(a) * b) >> kBits))
    default: return;
  }
#undef VNPU_INTEGERS
}

// Elements of one bit, whose 1 is -1 if signed.
Operation of_bits(Operation operation) {
  switch (operation) {
    case Operation::kAddInt:
    case Operation::kSubInt: return Operation::kXor;
    case Operation::kMulInt:
    case Operation::kMaxInt:
    case Operation::kMinUint: return Operation::kAnd;
    case Operation::kMinInt:
    case Operation::kMaxUint: return Operation::kOr;
    default: return operation;
  }
}

template <class T>
void compare_integers(int64_t predicate, std::byte* out, const Operand* in, size_t count) {
  using U = std::make_unsigned_t<T>;
  const auto loop = [&](auto zero, auto f) {
    using V = decltype(zero);
    auto* const to = reinterpret_cast<uint8_t*>(out);
    const V* const a = as<V>(in[0]);
    const V* const b = as<V>(in[1]);
    for (size_t i = 0; i < count; ++i) to[i] = f(a[i], b[i]);
  };
  switch (predicate) {  // mlir::arith::CmpIPredicate
    case 0: return loop(T{}, [](T a, T b) { return a == b; });
    case 1: return loop(T{}, [](T a, T b) { return a != b; });
    case 2: return loop(T{}, [](T a, T b) { return a < b; });
    case 3: return loop(T{}, [](T a, T b) { return a <= b; });
    case 4: return loop(T{}, [](T a, T b) { return a > b; });
    case 5: return loop(T{}, [](T a, T b) { return a >= b; });
    case 6: return loop(U{}, [](U a, U b) { return a < b; });
    case 7: return loop(U{}, [](U a, U b) { return a <= b; });
    case 8: return loop(U{}, [](U a, U b) { return a > b; });
    default: return loop(U{}, [](U a, U b) { return a >= b; });
  }
}

// --- floats --------------------------------------------------------------------------------------

template <class Format>
void compare_floats(int64_t predicate, std::byte* out, const Operand* in, size_t count) {
  using Wide = typename Format::Wide;
  const auto loop = [&](auto f) {
    auto* const to = reinterpret_cast<uint8_t*>(out);
    const auto* const a = as<typename Format::Stored>(in[0]);
    const auto* const b = as<typename Format::Stored>(in[1]);
    for (size_t i = 0; i < count; ++i) to[i] = f(Format::widen(a[i]), Format::widen(b[i]));
  };
  switch (predicate) {  // mlir::arith::CmpFPredicate
    case 0: return loop([](Wide, Wide) { return false; });
    case 1: return loop([](Wide a, Wide b) { return a == b; });
    case 2: return loop([](Wide a, Wide b) { return a > b; });
    case 3: return loop([](Wide a, Wide b) { return a >= b; });
    case 4: return loop([](Wide a, Wide b) { return a < b; });
    case 5: return loop([](Wide a, Wide b) { return a <= b; });
    case 6: return loop([](Wide a, Wide b) { return a < b || a > b; });
    case 7: return loop([](Wide a, Wide b) { return a == a && b == b; });
    case 8: return loop([](Wide a, Wide b) { return !(a < b || a > b); });
    case 9: return loop([](Wide a, Wide b) { return !(a <= b); });
    case 10: return loop([](Wide a, Wide b) { return !(a < b); });
    case 11: return loop([](Wide a, Wide b) { return !(a >= b); });
    case 12: return loop([](Wide a, Wide b) { return !(a > b); });
    case 13: return loop([](Wide a, Wide b) { return a != b; });
    case 14: return loop([](Wide a, Wide b) { return a != a || b != b; });
    default: return loop([](Wide, Wide) { return true; });
  }
}

template <class Format, class F>
void each_float(std::byte* out, const Operand* in, size_t count, F f) {
  auto* const to = reinterpret_cast<typename Format::Stored*>(out);
  const auto* const a = as<typename Format::Stored>(in[0]);
  if constexpr (std::is_invocable_v<F, typename Format::Wide>) {
    for (size_t i = 0; i < count; ++i) to[i] = Format::narrow(f(Format::widen(a[i])));
  } else if constexpr (std::is_invocable_v<F, typename Format::Wide, typename Format::Wide>) {
    const auto* const b = as<typename Format::Stored>(in[1]);
    for (size_t i = 0; i < count; ++i) {
      to[i] = Format::narrow(f(Format::widen(a[i]), Format::widen(b[i])));
    }
  } else {
    const auto* const b = as<typename Format::Stored>(in[1]);
    const auto* const c = as<typename Format::Stored>(in[2]);
    for (size_t i = 0; i < count; ++i) {
      to[i] = Format::narrow(f(Format::widen(a[i]), Format::widen(b[i]), Format::widen(c[i])));
    }
  }
}

template <class Format>
void floats(Operation operation, int64_t attribute, std::byte* out, const Operand* in, size_t n) {
  using W = typename Format::Wide;
#define VNPU_UNARY(OPERATION, EXPRESSION) \
  case Operation::OPERATION:              \
    return each_float<Format>(out, in, n, [](W a) -> W { return EXPRESSION; });
#define VNPU_BINARY(OPERATION, EXPRESSION) \
  case Operation::OPERATION:               \
    return each_float<Format>(out, in, n, [](W a, W b) -> W { return EXPRESSION; });
  switch (operation) {
    VNPU_BINARY(kAddFloat, a + b)
    VNPU_BINARY(kSubFloat, a - b)
    VNPU_BINARY(kMulFloat, a * b)
    VNPU_BINARY(kDivFloat, a / b)
    VNPU_BINARY(kRemFloat, std::fmod(a, b))
    VNPU_BINARY(kMaxNumber, a != a || b > a ? b : a)
    VNPU_BINARY(kMinNumber, a != a || b < a ? b : a)
    VNPU_BINARY(kMaximum, b != b || b > a ? b : a)
    VNPU_BINARY(kMinimum, b != b || b < a ? b : a)
    VNPU_BINARY(kPower, std::pow(a, b))
    VNPU_BINARY(kArcTangent2, std::atan2(a, b))
    VNPU_UNARY(kNegate, -a)
    VNPU_UNARY(kAbsolute, std::fabs(a))
    VNPU_UNARY(kCeil, std::ceil(a))
    VNPU_UNARY(kFloor, std::floor(a))
    VNPU_UNARY(kRoundEven, std::nearbyint(a))
    VNPU_UNARY(kTruncate, std::trunc(a))
    VNPU_UNARY(kRound, std::round(a))
    VNPU_UNARY(kSqrt, std::sqrt(a))
    VNPU_UNARY(kRsqrt, W{1} / std::sqrt(a))
    VNPU_UNARY(kExp, std::exp(a))
    VNPU_UNARY(kExp2, std::exp2(a))
    VNPU_UNARY(kExpm1, std::expm1(a))
    VNPU_UNARY(kLog, std::log(a))
    VNPU_UNARY(kLog2, std::log2(a))
    VNPU_UNARY(kLog1p, std::log1p(a))
    VNPU_UNARY(kSin, std::sin(a))
    VNPU_UNARY(kCos, std::cos(a))
    VNPU_UNARY(kTanh, std::tanh(a))
    VNPU_UNARY(kErf, std::erf(a))
    case Operation::kMultiplyAdd:
      return each_float<Format>(out, in, n, [](W a, W b, W c) -> W { return std::fma(a, b, c); });
    case Operation::kClamp:
      return attribute != 0
                 ? each_float<Format>(out, in, n,
                                      [](W x, W low, W high) -> W {
                                        return x != x ? x : std::min(std::max(x, low), high);
                                      })
                 : each_float<Format>(out, in, n, [](W x, W low, W high) -> W {
                     return x > low ? (x < high ? x : high) : low;  // of NaN: low
                   });
    default: return;
  }
#undef VNPU_UNARY
#undef VNPU_BINARY
}

template <class Format>
void classify(Operation operation, std::byte* out, const Operand& in, size_t count) {
  // Results are integers of 32 bits, as those of CUDA's library are.
  auto* const to = reinterpret_cast<int32_t*>(out);
  const auto* const from = as<typename Format::Stored>(in);
  for (size_t i = 0; i < count; ++i) {
    const auto x = Format::widen(from[i]);
    to[i] = operation == Operation::kIsNan   ? x != x
            : operation == Operation::kIsInf ? std::isinf(x)
                                             : std::isfinite(x);
  }
}

// --- conversions ---------------------------------------------------------------------------------

// A float32 from which rounding to fewer bits gives what rounding of the double itself would.
float rounded_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value || std::isinf(nearest))
    return nearest;
  auto bits = std::bit_cast<uint32_t>(nearest);
  if ((bits & 1u) != 0) return nearest;
  const bool is_beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(value);
  bits = is_beyond ? bits - 1 : bits + 1;
  return std::bit_cast<float>(bits);
}

template <class Format>
typename Format::Stored narrow(double value) {
  if constexpr (std::is_same_v<typename Format::Wide, double>) {
    return value;
  } else if constexpr (std::is_same_v<typename Format::Stored, float>) {
    return static_cast<float>(value);
  } else {
    return Format::narrow(rounded_to_odd(value));
  }
}

// 8-bit floats: values that are too large become the largest, NaN stays.
struct Small {
  int mantissa_bits;
  int bias;
  float largest;
  uint8_t not_a_number;

  float widen(uint8_t code) const {
    const int exponent = (code & 0x7f) >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const float sign = (code & 0x80) != 0 ? -1.0f : 1.0f;
    if ((code & 0x7f) == (not_a_number & 0x7f)) return std::numeric_limits<float>::quiet_NaN();
    if (mantissa_bits == 2 && exponent == 31) {
      return mantissa == 0 ? sign * INFINITY : std::numeric_limits<float>::quiet_NaN();
    }
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    return sign *
           std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - bias - mantissa_bits);
  }
  uint8_t narrow(float value) const {
    if (value != value) return not_a_number;
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    const float magnitude = std::min(std::fabs(value), largest);
    if (magnitude == 0) return sign;
    int exponent = std::max(std::ilogb(magnitude), 1 - bias);
    // In units of the last bit, so that rounding up may carry into the exponent of the code.
    const auto units =
        static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    return static_cast<uint8_t>(sign | (((exponent + bias - 1) << mantissa_bits) + units));
  }
};

constexpr Small kE4m3{3, 7, 448.0f, 0x7f};
constexpr Small kE5m2{2, 15, 57344.0f, 0x7e};

const Small* small(Type type) {
  if (type == Type::kFloat8E4m3) return &kE4m3;
  return type == Type::kFloat8E5m2 ? &kE5m2 : nullptr;
}

bool convert_floats(std::byte* out, Type type, const Operand& in, size_t count) {
  if (const Small* const from = small(in.type)) {
    return visit_float(type, [&](auto to) {
      using To = decltype(to);
      auto* const target = reinterpret_cast<typename To::Stored*>(out);
      for (size_t i = 0; i < count; ++i) {
        target[i] = narrow<To>(double{from->widen(as<uint8_t>(in)[i])});
      }
    });
  }
  return visit_float(in.type, [&](auto from) {
    using From = decltype(from);
    const auto* const source = as<typename From::Stored>(in);
    if (const Small* const to = small(type)) {
      auto* const target = reinterpret_cast<uint8_t*>(out);
      for (size_t i = 0; i < count; ++i) {
        target[i] = to->narrow(rounded_to_odd(static_cast<double>(From::widen(source[i]))));
      }
      return;
    }
    visit_float(type, [&](auto to) {
      using To = decltype(to);
      auto* const target = reinterpret_cast<typename To::Stored*>(out);
      for (size_t i = 0; i < count; ++i) {
        if constexpr (std::is_same_v<typename From::Wide, double>) {
          target[i] = narrow<To>(From::widen(source[i]));
        } else {
          target[i] = To::narrow(static_cast<typename To::Wide>(From::widen(source[i])));
        }
      }
    });
  });
}

template <class T, class W>
T saturated(W value) {
  // The bounds as floats: exact, or one more than the greatest integer.
  constexpr W kLow = static_cast<W>(std::numeric_limits<T>::min());
  constexpr W kHigh = static_cast<W>(std::numeric_limits<T>::max());
  if (value != value) return 0;
  if (value <= kLow) return std::numeric_limits<T>::min();
  if (value >= kHigh) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

bool float_to_integer(bool is_signed, std::byte* out, Type type, const Operand& in, size_t count) {
  return visit_float(in.type, [&](auto from) {
    using From = decltype(from);
    const auto* const source = as<typename From::Stored>(in);
    visit_int(type, [&](auto to) {
      using T = decltype(to);
      using U = std::make_unsigned_t<T>;
      auto* const target = reinterpret_cast<T*>(out);
      for (size_t i = 0; i < count; ++i) {
        const auto value = From::widen(source[i]);
        target[i] = is_signed ? saturated<T>(value) : static_cast<T>(saturated<U>(value));
      }
    });
  });
}

bool integer_to_float(bool is_signed, std::byte* out, Type type, const Operand& in, size_t count) {
  return visit_int(in.type, [&](auto from) {
    using T = decltype(from);
    using U = std::make_unsigned_t<T>;
    const T* const source = as<T>(in);
    const bool is_negated = in.type == Type::kInt1 && is_signed;
    visit_float(type, [&](auto to) {
      using To = decltype(to);
      auto* const target = reinterpret_cast<typename To::Stored*>(out);
      for (size_t i = 0; i < count; ++i) {
        const T value = is_negated ? static_cast<T>(-source[i]) : source[i];
        if constexpr (std::is_same_v<typename To::Stored, float>) {
          target[i] =
              is_signed ? static_cast<float>(value) : static_cast<float>(static_cast<U>(value));
        } else {
          const double wide =
              is_signed ? static_cast<double>(value) : static_cast<double>(static_cast<U>(value));
          target[i] = narrow<To>(wide);
        }
      }
    });
  });
}

bool resize_integers(bool is_signed, std::byte* out, Type type, const Operand& in, size_t count) {
  if (type == Type::kInt1) {
    return visit_int(in.type, [&](auto from) {
      for (size_t i = 0; i < count; ++i) {
        reinterpret_cast<uint8_t*>(out)[i] = as<decltype(from)>(in)[i] & 1;
      }
    });
  }
  return visit_int(in.type, [&](auto from) {
    using From = decltype(from);
    using Unsigned = std::make_unsigned_t<From>;
    visit_int(type, [&](auto to) {
      using To = decltype(to);
      auto* const target = reinterpret_cast<To*>(out);
      const From* const source = as<From>(in);
      if (in.type == Type::kInt1 && is_signed) {
        for (size_t i = 0; i < count; ++i) target[i] = static_cast<To>(-source[i]);
      } else if (is_signed) {
        for (size_t i = 0; i < count; ++i) target[i] = static_cast<To>(source[i]);
      } else {
        for (size_t i = 0; i < count; ++i)
          target[i] = static_cast<To>(static_cast<Unsigned>(source[i]));
      }
    });
  });
}

// --- the rest ------------------------------------------------------------------------------------

template <class T>
void select(std::byte* out, const Operand* in, size_t count) {
  auto* const to = reinterpret_cast<T*>(out);
  const uint8_t* const condition = as<uint8_t>(in[0]);
  const T* const a = as<T>(in[1]);
  const T* const b = as<T>(in[2]);
  for (size_t i = 0; i < count; ++i) to[i] = condition[i] != 0 ? a[i] : b[i];
}

void add_pointers(int64_t bytes, std::byte* out, const Operand* in, size_t count) {
  auto* const to = reinterpret_cast<uint64_t*>(out);
  const uint64_t* const base = as<uint64_t>(in[0]);
  visit_int(in[1].type, [&](auto zero) {
    using T = decltype(zero);
    const T* const offset = as<T>(in[1]);
    for (size_t i = 0; i < count; ++i)
      to[i] = base[i] + static_cast<uint64_t>(int64_t{offset[i]} * bytes);
  });
}

bool compute_known(Operation operation, int64_t attribute, std::byte* out, Type type,
                   const Operand* in, size_t count) {
  switch (operation) {
    case Operation::kCopy: std::memcpy(out, in[0].data, count * bytes_of(type)); return true;
    case Operation::kAddPointer: add_pointers(attribute, out, in, count); return true;
    case Operation::kSelect:
      switch (bytes_of(type)) {
        case 1: select<uint8_t>(out, in, count); return true;
        case 2: select<uint16_t>(out, in, count); return true;
        case 4: select<uint32_t>(out, in, count); return true;
        default: select<uint64_t>(out, in, count); return true;
      }
    case Operation::kCompareInt:
      return visit_int(in[0].type, [&](auto zero) {
        compare_integers<decltype(zero)>(attribute, out, in, count);
      });
    case Operation::kCompareFloat:
      return visit_float(in[0].type, [&](auto format) {
        compare_floats<decltype(format)>(attribute, out, in, count);
      });
    case Operation::kAbsInt:
      return visit_int(type, [&](auto zero) {
        using T = decltype(zero);
        for (size_t i = 0; i < count; ++i) {
          const T value = as<T>(in[0])[i];
          reinterpret_cast<T*>(out)[i] =
              value < 0 ? static_cast<T>(0 - static_cast<uint64_t>(value)) : value;
        }
      });
    case Operation::kExtendInt: return resize_integers(true, out, type, in[0], count);
    case Operation::kExtendUint:
    case Operation::kTruncateInt: return resize_integers(false, out, type, in[0], count);
    case Operation::kIntToFloat: return integer_to_float(true, out, type, in[0], count);
    case Operation::kUintToFloat: return integer_to_float(false, out, type, in[0], count);
    case Operation::kFloatToInt: return float_to_integer(true, out, type, in[0], count);
    case Operation::kFloatToUint: return float_to_integer(false, out, type, in[0], count);
    case Operation::kConvertFloat: return convert_floats(out, type, in[0], count);
    case Operation::kIsNan:
    case Operation::kIsInf:
    case Operation::kIsFinite:
      return visit_float(in[0].type, [&](auto format) {
        classify<decltype(format)>(operation, out, in[0], count);
      });
    default: break;
  }
  if (operation <= Operation::kMulHighUint) {
    return visit_int(type, [&](auto zero) {
      integers<decltype(zero)>(type == Type::kInt1 ? of_bits(operation) : operation, out, in,
                               count);
    });
  }
  return visit_float(
      type, [&](auto format) { floats<decltype(format)>(operation, attribute, out, in, count); });
}

}  // namespace

void compute(Operation operation, int64_t attribute, std::byte* out, Type type, const Operand* in,
             size_t count) {
  if (!compute_known(operation, attribute, out, type, in, count)) refuse(operation, type);
}

void fill(std::byte* out, size_t bytes, const std::byte* value, size_t count) {
  const auto loop = [&](auto element) {
    std::memcpy(&element, value, sizeof(element));
    std::fill_n(reinterpret_cast<decltype(element)*>(out), count, element);
  };
  switch (bytes) {
    case 1: return loop(uint8_t{});
    case 2: return loop(uint16_t{});
    case 4: return loop(uint32_t{});
    default: return loop(uint64_t{});
  }
}

void widen(float* out, const Operand& in, size_t count) {
  if (!convert_floats(reinterpret_cast<std::byte*>(out), Type::kFloat32, in, count)) {
    refuse(Operation::kDot, in.type);
  }
}

template <class T>
void multiply(T* out, const T* left, const T* right, size_t m, size_t n, size_t k) {
  for (size_t row = 0; row < m; ++row) {
    T* const to = out + row * n;
    for (size_t i = 0; i < k; ++i) {
      const T factor = left[row * k + i];
      const T* const from = right + i * n;
      for (size_t column = 0; column < n; ++column) to[column] += factor * from[column];
    }
  }
}
template void multiply<float>(float*, const float*, const float*, size_t, size_t, size_t);
template void multiply<double>(double*, const double*, const double*, size_t, size_t, size_t);
template void multiply<int32_t>(int32_t*, const int32_t*, const int32_t*, size_t, size_t, size_t);

}  // namespace vnpu::triton
