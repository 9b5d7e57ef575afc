// Vectors of floats: loads, sums, e^x, and rows of other types as floats. Included once per vector
// width by attention_kernel_body.h, inside a namespace: no include guard.

constexpr int kFloats = VNPU_VECTOR_FLOATS;

typedef float Vector __attribute__((vector_size(kFloats * 4)));
typedef float Unaligned __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kFloats * 4)));
typedef uint32_t Words __attribute__((vector_size(kFloats * 4)));
typedef uint16_t HalfWords __attribute__((vector_size(kFloats * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kFloats), aligned(1), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void save(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
inline Vector splat(float value) { return value - Vector{}; }

// Combines all lanes by halves, in registers: the compiler's code for a loop goes through memory,
// and decoding attention does this for each score.
template <typename Combine>
inline float fold(Vector value, Combine combine) {
#if VNPU_VECTOR_FLOATS == 16
  const __m256 eight = combine(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
  const __m128 four = combine(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif VNPU_VECTOR_FLOATS == 8
  const __m128 four = combine(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
#else
  const Vector four = value;
#endif
  return combine(combine(four[0], four[2]), combine(four[1], four[3]));
}

inline float sum(Vector value) {
  return fold(value, [](auto a, auto b) { return a + b; });
}

inline float maximum(Vector value) {
  return fold(value, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x for x <= 0 to about 1 ulp; 0 below the smallest normal number. e^x = 2^n * e^r with |r| <=
// ln(2)/2; the coefficients are those of Cephes' expf.
inline Vector exponential(Vector x) {
  const Vector bounded = x < splat(-87.3f) ? splat(-87.3f) : x;
  const Vector shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector n = (bounded * 1.44269504088896341f + shift) - shift;
  Vector r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Vector result = y * reinterpret_cast<Vector>(exponent);
  return x < splat(-87.3f) ? Vector{} : result;
}

// Widens 16-bit words to 32 bits in one instruction, where the compiler would use four.
inline Words widen_words(const char* from) {
#if VNPU_VECTOR_FLOATS == 16
  return reinterpret_cast<Words>(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif VNPU_VECTOR_FLOATS == 8
  return reinterpret_cast<Words>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(*reinterpret_cast<const HalfWords*>(from), Words);
#endif
}

inline Vector widen_bfloat16(const char* from) {
  return reinterpret_cast<Vector>(widen_words(from) << 16);
}

inline Vector widen_half(const char* from) {
  const Words wide = widen_words(from);
  const Words magnitude = (wide & 0x7fffu) << 13;
  const Words sign = (wide & 0x8000u) << 16;
  // 2^112 moves the exponent's bias from 15 to 127 and makes subnormal numbers normal.
  const Vector finite = reinterpret_cast<Vector>(magnitude) * 0x1p112f;
  const Words special = magnitude | 0x7f800000u;
  const Words value = magnitude >= 0x0f800000u ? special : reinterpret_cast<Words>(finite);
  return reinterpret_cast<Vector>(value | sign);
}

inline float number(Element element, const char* from) {
  switch (element) {
    case Element::kFloat: return *reinterpret_cast<const float*>(from);
    case Element::kBFloat16: return *reinterpret_cast<const c10::BFloat16*>(from);
    case Element::kHalf: return *reinterpret_cast<const c10::Half*>(from);
    case Element::kInt8: return *reinterpret_cast<const int8_t*>(from);
  }
  return 0;
}

// `count` elements as floats.
inline void widen_row(Element element, const char* from, int64_t count, float* to) {
  int64_t i = 0;
  switch (element) {
    case Element::kFloat: std::memcpy(to, from, static_cast<size_t>(count) * 4); return;
    case Element::kBFloat16:
      for (; i + kFloats <= count; i += kFloats) {
        save(to + i, widen_bfloat16(from + 2 * i));
      }
      break;
    case Element::kHalf:
      for (; i + kFloats <= count; i += kFloats) {
        save(to + i, widen_half(from + 2 * i));
      }
      break;
    case Element::kInt8:
      for (; i + kFloats <= count; i += kFloats) {
        save(to + i, __builtin_convertvector(*reinterpret_cast<const Bytes*>(from + i), Vector));
      }
      break;
  }
  const int64_t bytes = element_bytes(element);
  for (; i < count; ++i) to[i] = number(element, from + i * bytes);
}

inline void narrow_row(Element element, const float* from, int64_t count, char* to) {
  switch (element) {
    case Element::kFloat: std::memcpy(to, from, static_cast<size_t>(count) * 4); return;
    case Element::kBFloat16:
      for (int64_t i = 0; i < count; ++i) {
        reinterpret_cast<c10::BFloat16*>(to)[i] = c10::BFloat16(from[i]);
      }
      return;
    case Element::kHalf:
      for (int64_t i = 0; i < count; ++i) reinterpret_cast<c10::Half*>(to)[i] = c10::Half(from[i]);
      return;
    case Element::kInt8: return;  // int8 results are made from fp32 ones by the caller
  }
}
