// Included once per vector width by attention_kernel.cpp, inside a namespace: no include guard.

constexpr int kFloats = VNPU_VECTOR_FLOATS;
constexpr int kColumns = kFloats == 16 ? 4 : 2;  // vectors per row of a block of the matrix product
constexpr int kRows = 6;  // its rows: kRows * kColumns sums stay in registers

typedef float Vector __attribute__((vector_size(kFloats * 4)));
typedef float Unaligned __attribute__((vector_size(kFloats * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(kFloats * 4)));
typedef uint32_t Words __attribute__((vector_size(kFloats * 4)));
typedef uint16_t HalfWords __attribute__((vector_size(kFloats * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(kFloats), aligned(1), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void save(float* to, Vector value) { *reinterpret_cast<Unaligned*>(to) = value; }
inline Vector splat(float value) { return value - Vector{}; }

// All lanes by halves, in registers: what the compiler makes of a loop goes through memory, and
// decoding attention takes one for each score.
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

// 16-bit words as 32-bit ones: in one instruction, of which the compiler makes four.
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

// A block of c[m][n] (+)= sum over k of a[m][k] * b[k][n], kept in registers.
template <int M, int N>
inline void multiply_block(const float* a, int64_t a_row, int64_t a_column, const float* b,
                           int64_t b_row, float* c, int64_t c_row, int64_t depth, bool accumulate) {
  Vector sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      sums[m][n] = accumulate ? load(c + m * c_row + n * kFloats) : Vector{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) columns[n] = load(b + k * b_row + n * kFloats);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vector factor = splat(a[m * a_row + k * a_column]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] += factor * columns[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) save(c + m * c_row + n * kFloats, sums[m][n]);
  }
}

template <int N>
void multiply_columns(const float* a, int64_t a_row, int64_t a_column, const float* b,
                      int64_t b_row, float* c, int64_t c_row, int64_t rows, int64_t depth,
                      bool accumulate) {
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows) {
    multiply_block<kRows, N>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, depth,
                             accumulate);
  }
  for (; m + 2 <= rows; m += 2) {
    multiply_block<2, N>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, depth,
                         accumulate);
  }
  if (m < rows) {
    multiply_block<1, N>(a + m * a_row, a_row, a_column, b, b_row, c + m * c_row, c_row, depth,
                         accumulate);
  }
}

// c[rows][columns] (+)= a * b, columns a multiple of the vector.
void multiply(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
              float* c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth,
              bool accumulate) {
  int64_t n = 0;
  for (; n + kColumns * kFloats <= columns; n += kColumns * kFloats) {
    multiply_columns<kColumns>(a, a_row, a_column, b + n, b_row, c + n, c_row, rows, depth,
                               accumulate);
  }
  for (; n < columns; n += kFloats) {
    multiply_columns<1>(a, a_row, a_column, b + n, b_row, c + n, c_row, rows, depth, accumulate);
  }
}

// scores[r][t] for few rows: products along the head dimension, `width` a multiple of the vector.
template <int R>
void score_rows(const float* query, int64_t query_row, const float* keys, int64_t key_row,
                int64_t tokens, int64_t width, float* scores, int64_t score_row) {
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4) {
    Vector sums[R][4] = {};
    for (int64_t d = 0; d < width; d += kFloats) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const Vector k = load(keys + (t + j) * key_row + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r][j] += load(query + r * query_row + d) * k;
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 4; ++j) scores[r * score_row + t + j] = sum(sums[r][j]);
    }
  }
  for (; t < tokens; ++t) {
    for (int r = 0; r < R; ++r) {
      Vector one{};
      for (int64_t d = 0; d < width; d += kFloats) {
        one += load(query + r * query_row + d) * load(keys + t * key_row + d);
      }
      scores[r * score_row + t] = sum(one);
    }
  }
}

inline const char* row_at(const AttentionProblem& problem, const AttentionRequest& request,
                          const RowSource& source, int64_t head, int64_t token) {
  const char* const base = source.data + head * source.head_stride;
  if (request.block_table == nullptr) return base + token * source.token_stride;
  return base + request.block_table[token / problem.block_size] * source.block_stride +
         token % problem.block_size * source.token_stride;
}

inline void dequantize_row(const AttentionProblem& problem, const AttentionRequest& request,
                           const Dequantization& how, int64_t head, int64_t token, int64_t width,
                           float* row) {
  int64_t at = head * how.head;
  if (request.block_table != nullptr && how.block != 0) {
    at += request.block_table[token / problem.block_size] * how.block +
          token % problem.block_size * how.token;
  } else {
    at += token * how.token;
  }
  for (int64_t d = 0; d < width; ++d) {
    const int64_t i = at + d * how.channel;
    row[d] = (row[d] + (how.offset != nullptr ? how.offset[i] : 0.0f)) * how.scale[i];
  }
}

// A cache is read once per step and seldom found in the nearest caches; rows lie too far apart for
// the processor to foresee the next one.
constexpr int64_t kRowsAhead = 32;

// Compressed keys and values are the same rows.
inline bool same_rows(const RowSource& one, const RowSource& other) {
  return one.data == other.data && one.element == other.element && one.width == other.width &&
         one.token_stride == other.token_stride && one.head_stride == other.head_stride &&
         one.block_stride == other.block_stride && one.dequantization.scale == nullptr &&
         other.dequantization.scale == nullptr;
}

inline void prefetch_row(const RowSource& source, const char* row) {
  const int64_t bytes = source.width * element_bytes(source.element);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

inline void prefetch_rows(const AttentionProblem& problem, const AttentionRequest& request,
                          const RowSource& source, int64_t head, int64_t first) {
  const int64_t count = std::min(kRowsAhead, request.key_length - first);
  for (int64_t t = 0; t < count; ++t) {
    prefetch_row(source, row_at(problem, request, source, head, first + t));
  }
}

// Rows [first, first + count) of a source as floats, `stride` apart from `to` on. Returns where
// they are: the source's own memory when it is fp32 there already and one stride describes it.
inline const float* tile_rows(const AttentionProblem& problem, const AttentionRequest& request,
                              const RowSource& source, int64_t head, int64_t first, int64_t count,
                              bool in_place, float* to, int64_t* stride) {
  const bool one_block = request.block_table == nullptr ||
                         first / problem.block_size == (first + count - 1) / problem.block_size;
  if (in_place && one_block && source.element == Element::kFloat && source.width % kFloats == 0) {
    *stride = source.token_stride / 4;
    return reinterpret_cast<const float*>(row_at(problem, request, source, head, first));
  }
  const bool quantized = source.dequantization.scale != nullptr;
  const char* next = one_block ? row_at(problem, request, source, head, first) : nullptr;
  for (int64_t t = 0; t < count; ++t) {
    if (!one_block) next = row_at(problem, request, source, head, first + t);
    // Reads past a block's end ask for memory that nobody waits for.
    prefetch_row(source, next + kRowsAhead * source.token_stride);
    float* const row = to + t * *stride;
    widen_row(source.element, next, source.width, row);
    if (quantized) {
      dequantize_row(problem, request, source.dequantization, head, first + t, source.width, row);
    }
    next += source.token_stride;
  }
  return to;
}

// The state of the softmax of each row, and its visible keys.
struct Rows {
  int64_t first[kMaxPieceRows];
  int64_t last[kMaxPieceRows];
  alignas(64) float maximum[kMaxPieceRows + 16];
  alignas(64) float total[kMaxPieceRows + 16];
  alignas(64) float decay[kMaxPieceRows + 16];
};

// Softmax of one tile whose scores are [token][row]: lanes are rows.
inline void softmax_columns(Rows& rows, int64_t padded, float* scores, int64_t tokens) {
  for (int64_t r = 0; r < padded; r += kFloats) {
    const Vector before = load(rows.maximum + r);
    Vector top = before;
    for (int64_t t = 0; t < tokens; ++t) {
      const Vector s = load(scores + t * padded + r);
      top = s > top ? s : top;
    }
    const Vector zero{};
    const Vector base = top == splat(-kInfinity) ? zero : top;  // nothing visible yet
    const Vector decay = exponential(before - base);
    Vector total = load(rows.total + r) * decay;
    for (int64_t t = 0; t < tokens; ++t) {
      const Vector p = exponential(load(scores + t * padded + r) - base);
      save(scores + t * padded + r, p);
      total += p;
    }
    save(rows.maximum + r, top);
    save(rows.total + r, total);
    save(rows.decay + r, decay);
  }
}

// The same with scores [row][token] and kTile scores per row: lanes are tokens.
inline void softmax_rows(Rows& rows, int64_t count, float* scores) {
  for (int64_t r = 0; r < count; ++r) {
    float* const row = scores + r * kTile;
    Vector top = load(row);
    for (int64_t t = kFloats; t < kTile; t += kFloats) {
      const Vector s = load(row + t);
      top = s > top ? s : top;
    }
    const float before = rows.maximum[r];
    const float highest = std::max(before, maximum(top));
    const float base = highest == -kInfinity ? 0.0f : highest;
    Vector total{};
    for (int64_t t = 0; t < kTile; t += kFloats) {
      const Vector p = exponential(load(row + t) - splat(base));
      save(row + t, p);
      total += p;
    }
    const float decay = before == -kInfinity ? 0.0f : std::exp(before - base);
    rows.maximum[r] = highest;
    rows.decay[r] = decay;
    rows.total[r] = rows.total[r] * decay + sum(total);
  }
}

void attend(const AttentionProblem& problem, const AttentionPiece& piece) {
  const AttentionRequest& request = problem.requests[static_cast<size_t>(piece.request)];
  const int64_t group = problem.query_heads / problem.key_heads;
  const int64_t count = piece.rows;
  const int64_t width = round_up(problem.head_size + problem.rope_size, kFloats);
  const int64_t value_width = round_up(problem.value_size, kFloats);
  const bool few = count < 8;  // too few rows to fill vectors with rows
  const int64_t padded = round_up(count, kFloats);
  const auto head_of = [&](int64_t r) {
    return piece.key_head * group + (piece.first_row + r) % group;
  };
  const auto query_of = [&](int64_t r) { return (piece.first_row + r) / group; };

  Rows rows;
  int64_t begin = request.key_length;
  int64_t end = 0;
  for (int64_t r = 0; r < count; ++r) {
    rows.first[r] = std::max<int64_t>(0, query_of(r) + request.first_visible);
    rows.last[r] = std::min(request.key_length - 1, query_of(r) + request.last_visible);
    if (rows.first[r] > rows.last[r]) continue;
    begin = std::min(begin, rows.first[r]);
    end = std::max(end, rows.last[r] + 1);
  }
  for (int64_t r = 0; r < padded; ++r) {
    const bool sink = r < count && problem.sink != nullptr;
    rows.maximum[r] = sink ? problem.sink[head_of(r)] : -kInfinity;
    rows.total[r] = sink ? 1.0f : 0.0f;
  }

  if (begin < end) {
    prefetch_rows(problem, request, request.key, piece.key_head, begin / kTile * kTile);
  }
  float* memory = scratch(padded * width + kTile * width + kTile * value_width +
                          count * value_width + kTile * std::max<int64_t>(padded, 16));
  const auto take = [&memory](int64_t floats) {
    float* const taken = memory;
    memory += floats;
    return taken;
  };
  float* const query = take(padded * width);  // [row][d] when few, else [d][row]
  float* const keys = take(kTile * width);
  float* const values = take(kTile * value_width);
  float* const sums = take(count * value_width);
  float* const scores =
      take(kTile * std::max<int64_t>(padded, 16));  // [row][t] when few, else [t][row]
  std::fill_n(query, padded * width, 0.0f);
  std::fill_n(sums, count * value_width, 0.0f);
  if (width != problem.head_size + problem.rope_size) std::fill_n(keys, kTile * width, 0.0f);
  if (value_width != problem.value_size) std::fill_n(values, kTile * value_width, 0.0f);

  for (int64_t r = 0; r < count; ++r) {
    float* const row = few ? query + r * width : keys;
    widen_row(problem.query_element,
              request.query + head_of(r) * problem.query_head_stride +
                  query_of(r) * problem.query_token_stride,
              problem.head_size, row);
    if (problem.rope_size > 0) {
      widen_row(problem.query_rope_element,
                request.query_rope + head_of(r) * problem.query_rope_head_stride +
                    query_of(r) * problem.query_rope_token_stride,
                problem.rope_size, row + problem.head_size);
    }
    if (few) continue;
    for (int64_t d = 0; d < problem.head_size + problem.rope_size; ++d)
      query[d * padded + r] = row[d];
  }

  const bool shared = same_rows(request.key, request.value);
  for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
    const int64_t tokens = std::min(kTile, request.key_length - tile);
    if (!shared) prefetch_rows(problem, request, request.value, piece.key_head, tile);
    int64_t key_stride = width;
    const float* const k = tile_rows(problem, request, request.key, piece.key_head, tile, tokens,
                                     problem.rope_size == 0, keys, &key_stride);
    if (problem.rope_size > 0) {
      int64_t stride = width;
      tile_rows(problem, request, request.key_rope, piece.key_head, tile, tokens, false,
                keys + problem.head_size, &stride);
    }
    if (few) {
      int64_t r = 0;
      for (; r + 4 <= count; r += 4) {
        score_rows<4>(query + r * width, width, k, key_stride, tokens, width, scores + r * kTile,
                      kTile);
      }
      for (; r + 2 <= count; r += 2) {
        score_rows<2>(query + r * width, width, k, key_stride, tokens, width, scores + r * kTile,
                      kTile);
      }
      if (r < count) {
        score_rows<1>(query + r * width, width, k, key_stride, tokens, width, scores + r * kTile,
                      kTile);
      }
    } else {
      multiply(k, key_stride, 1, query, padded, scores, padded, tokens, padded, width, false);
    }

    const int64_t row_step = few ? kTile : 1;
    const int64_t token_step = few ? 1 : padded;
    const int64_t all = few ? count * kTile : tokens * padded;
    for (int64_t i = 0; i < all; i += kFloats) save(scores + i, load(scores + i) * problem.scale);
    for (int64_t r = 0; r < count; ++r) {
      float* const row = scores + r * row_step;
      if (request.bias != nullptr) {
        const float* const bias = request.bias + head_of(r) * problem.bias_head_stride +
                                  query_of(r) * problem.bias_query_stride + tile;
        for (int64_t t = 0; t < tokens; ++t) row[t * token_step] += bias[t] * problem.bias_factor;
      }
      if (request.mask != nullptr) {
        const uint8_t* const mask = request.mask + head_of(r) * problem.mask_head_stride +
                                    query_of(r) * problem.mask_query_stride + tile;
        for (int64_t t = 0; t < tokens; ++t) {
          if (mask[t] != 0) row[t * token_step] = -kInfinity;
        }
      }
      const int64_t hidden_before = std::clamp<int64_t>(rows.first[r] - tile, 0, tokens);
      const int64_t hidden_from = std::clamp<int64_t>(rows.last[r] + 1 - tile, 0, tokens);
      for (int64_t t = 0; t < hidden_before; ++t) row[t * token_step] = -kInfinity;
      for (int64_t t = hidden_from; t < (few ? kTile : tokens); ++t)
        row[t * token_step] = -kInfinity;
    }
    if (few) {
      softmax_rows(rows, count, scores);
    } else {
      softmax_columns(rows, padded, scores, tokens);
    }

    for (int64_t r = 0; r < count; ++r) {
      if (rows.decay[r] == 1.0f) continue;
      for (int64_t d = 0; d < value_width; d += kFloats) {
        save(sums + r * value_width + d, load(sums + r * value_width + d) * rows.decay[r]);
      }
    }
    int64_t value_stride = shared ? key_stride : value_width;
    const float* const v = shared ? k
                                  : tile_rows(problem, request, request.value, piece.key_head, tile,
                                              tokens, true, values, &value_stride);
    multiply(scores, row_step, token_step, v, value_stride, sums, value_width, count, value_width,
             tokens, true);
  }

  for (int64_t r = 0; r < count; ++r) {
    float* const row = sums + r * value_width;
    // A row that sees no key is zero, with the value that marks it as void in place of its lse.
    const bool visible = rows.maximum[r] != -kInfinity && rows.first[r] <= rows.last[r];
    const float total = visible ? rows.total[r] : 1.0f;
    for (int64_t d = 0; d < value_width; d += kFloats) save(row + d, load(row + d) / total);
    narrow_row(problem.out_element, row, problem.value_size,
               request.out + head_of(r) * problem.out_head_stride +
                   query_of(r) * problem.out_token_stride);
    const int64_t at =
        head_of(r) * problem.lse_head_stride + query_of(r) * problem.lse_token_stride;
    if (request.lse != nullptr) {
      request.lse[at] = visible ? rows.maximum[r] + std::log(total) : kInfinity;
    }
    if (request.softmax_max != nullptr) request.softmax_max[at] = rows.maximum[r];
    if (request.softmax_sum != nullptr) request.softmax_sum[at] = visible ? total : 0.0f;
  }
}
