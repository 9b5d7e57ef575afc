#include "ops/matmul/decode_matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define VNPU_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
// The sums of a tile stay in registers only when the loops over them are unrolled.
#define VNPU_UNROLL _Pragma("GCC unroll 16")
#endif

namespace vnpu::ops {

#if defined(__x86_64__)
namespace {

constexpr int64_t kMostRows = 64;            // above, rearranging the weight pays
constexpr int kStep = 32;                    // elements of one register
constexpr int kSums = 16;                    // dot products of one tile, one register each
constexpr int64_t kHalf = 32;                // columns of a register of bfloat16
constexpr int64_t kTileRows = 6;             // rows whose sums fit in registers beside each other
constexpr int64_t kGrainProducts = 1 << 20;  // multiply-adds worth a second thread

bool is_supported() {
  static const bool supported = __builtin_cpu_supports("avx512bf16") != 0 &&
                                __builtin_cpu_supports("avx512bw") != 0 &&
                                __builtin_cpu_supports("avx512vl") != 0;
  return supported;
}

VNPU_TARGET inline __attribute__((always_inline)) __m512bh load(const at::BFloat16* from,
                                                                __mmask32 mask) {
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, from));
}

// Element i of the result is the sum of sums[i]'s elements.
VNPU_TARGET inline __attribute__((always_inline)) __m512 reduce(const __m512* sums) {
  __m512 pairs[8];
  VNPU_UNROLL for (int i = 0; i < 8; ++i) {
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                             _mm512_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
  }
  __m512 lanes[4];  // each 128-bit lane: its part of four sums
  VNPU_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(pairs[2 * i]);
    const __m512d high = _mm512_castps_pd(pairs[2 * i + 1]);
    lanes[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  const __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x44),
                                     _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xEE));
  const __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[2], lanes[3], 0x44),
                                      _mm512_shuffle_f32x4(lanes[2], lanes[3], 0xEE));
  return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                       _mm512_shuffle_f32x4(first, second, 0xDD));
}

// A tile of the result: kRows x kColumns dot products from (m0, n0). The first tile of a strip asks
// for the next strip's columns, which otherwise come too late from beyond the nearest cache.
template <int kRows, int kColumns>
VNPU_TARGET inline __attribute__((always_inline)) void tile(const DecodeProduct& o, int64_t m0,
                                                            int64_t n0) {
  static_assert(kRows * kColumns <= kSums);
  const int64_t columns = std::min<int64_t>(kColumns, o.n - n0);
  const at::BFloat16* row[kRows];
  const at::BFloat16* column[kColumns];
  VNPU_UNROLL for (int i = 0; i < kRows; ++i) row[i] = o.rows + (m0 + i) * o.row_stride;
  // Past the last column the last one is read again, and not stored.
  VNPU_UNROLL for (int j = 0; j < kColumns; ++j) {
    column[j] = o.weight + (n0 + std::min<int64_t>(j, columns - 1)) * o.column_stride;
  }
  __m512 sums[kSums];
  VNPU_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < o.depth; k += kStep) {
    const int64_t left = o.depth - k;
    const __mmask32 mask = left >= kStep ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    __m512bh weight[kColumns];
    VNPU_UNROLL for (int j = 0; j < kColumns; ++j) {
      weight[j] = load(column[j] + k, mask);
      if (m0 == 0) _mm_prefetch(column[j] + k + kColumns * o.column_stride, _MM_HINT_T0);
    }
    VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
      const __m512bh value = load(row[i] + k, mask);
      VNPU_UNROLL for (int j = 0; j < kColumns; ++j) {
        sums[i * kColumns + j] = _mm512_dpbf16_ps(sums[i * kColumns + j], value, weight[j]);
      }
    }
  }
  alignas(64) float result[kSums];
  _mm512_store_ps(result, reduce(sums));
  if (o.bias != nullptr) {
    VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        result[i * kColumns + j] += static_cast<float>(o.bias[n0 + j]);
      }
    }
  }
  alignas(32) at::BFloat16 rounded[kSums];
  _mm256_store_si256(reinterpret_cast<__m256i*>(rounded),
                     reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_load_ps(result))));
  VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
    std::memcpy(o.out + (m0 + i) * o.out_stride + n0, rounded + i * kColumns,
                static_cast<size_t>(columns) * sizeof(at::BFloat16));
  }
}

template <int kRows, int kColumns>
VNPU_TARGET void strip(const DecodeProduct& o, int64_t begin, int64_t end) {
  for (int64_t n0 = begin; n0 < end; n0 += kColumns) {
    int64_t m0 = 0;
    for (; m0 + kRows <= o.m; m0 += kRows) tile<kRows, kColumns>(o, m0, n0);
    switch (o.m - m0) {
      case 1: tile<1, kColumns>(o, m0, n0); break;
      case 2:
        if constexpr (kRows > 2) tile<2, kColumns>(o, m0, n0);
        break;
      case 3:
        if constexpr (kRows > 3) tile<3, kColumns>(o, m0, n0);
        break;
      default: break;
    }
  }
}

// Sums of 32 neighbouring columns as the products of pairs leave them: `low` has columns 8 i to 8 i
// + 3 of each 128-bit lane i, `high` the four after them.
struct PairedSums {
  __m512 low, high;
};

VNPU_TARGET inline __attribute__((always_inline)) void store_row(const PairedSums& sums,
                                                                 const at::BFloat16* bias,
                                                                 at::BFloat16* out,
                                                                 __mmask32 mask) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  __m512 values[2] = {_mm512_permutex2var_ps(sums.low, first, sums.high),
                      _mm512_permutex2var_ps(sums.low, second, sums.high)};
  VNPU_UNROLL for (int half = 0; half < 2; ++half) {
    const auto part = static_cast<__mmask16>(mask >> (16 * half));
    if (bias != nullptr) {
      const __m256i bits = _mm256_maskz_loadu_epi16(part, bias + 16 * half);
      const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
      values[half] = _mm512_add_ps(values[half], _mm512_castsi512_ps(wide));
    }
    _mm256_mask_storeu_epi16(out + 16 * half, part,
                             reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values[half])));
  }
}

// A tile of the result from a weight that is dense along its rows: kRows rows and kHalves times 32
// columns, of which `mask` says which exist.
template <int kRows, int kHalves>
struct RowTile {
  PairedSums sums[kRows][kHalves];
  __mmask32 mask[kHalves];
};

// Two rows of the weight interleaved into the pairs that the CPU multiplies; 32 columns.
struct Pairs {
  __m512bh low, high;
};

template <bool kIsPair>
VNPU_TARGET inline __attribute__((always_inline)) Pairs interleave(const at::BFloat16* weight,
                                                                   int64_t depth_stride,
                                                                   __mmask32 mask) {
  const __m512i one = _mm512_maskz_loadu_epi16(mask, weight);
  const __m512i two =
      kIsPair ? _mm512_maskz_loadu_epi16(mask, weight + depth_stride) : _mm512_setzero_si512();
  return {reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(one, two)),
          reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(one, two))};
}

template <bool kIsPair, int kRows, int kHalves>
VNPU_TARGET inline __attribute__((always_inline)) void add_pairs(const DecodeProduct& o,
                                                                 RowTile<kRows, kHalves>& tile,
                                                                 const at::BFloat16* row,
                                                                 const Pairs (&pairs)[kHalves]) {
  VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
    uint32_t values = 0;
    std::memcpy(&values, row + i * o.row_stride, kIsPair ? 4 : 2);
    const auto value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(values)));
    VNPU_UNROLL for (int j = 0; j < kHalves; ++j) {
      PairedSums& sums = tile.sums[i][j];
      sums.low = _mm512_dpbf16_ps(sums.low, value, pairs[j].low);
      sums.high = _mm512_dpbf16_ps(sums.high, value, pairs[j].high);
    }
  }
}

template <int kRows, int kHalves>
VNPU_TARGET inline __attribute__((always_inline)) void clear(const DecodeProduct& o, int64_t n0,
                                                             RowTile<kRows, kHalves>& tile) {
  VNPU_UNROLL for (int j = 0; j < kHalves; ++j) {
    const int64_t left = std::clamp<int64_t>(o.n - n0 - kHalf * j, 0, kHalf);
    tile.mask[j] = left == kHalf ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
      tile.sums[i][j] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    }
  }
}

template <int kRows, int kHalves>
VNPU_TARGET inline __attribute__((always_inline)) void finish(const DecodeProduct& o, int64_t m0,
                                                              int64_t n0,
                                                              const RowTile<kRows, kHalves>& tile) {
  VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
    VNPU_UNROLL for (int j = 0; j < kHalves; ++j) {
      store_row(tile.sums[i][j], o.bias == nullptr ? nullptr : o.bias + n0 + kHalf * j,
                o.out + (m0 + i) * o.out_stride + n0 + kHalf * j, tile.mask[j]);
    }
  }
}

// Multiplies rows k and k + 1 of the weight, or the last one alone, straight from memory.
template <bool kIsPair, int kRows, int kHalves>
VNPU_TARGET inline __attribute__((always_inline)) void read_and_add(const DecodeProduct& o,
                                                                    RowTile<kRows, kHalves>& tile,
                                                                    int64_t n0, int64_t k) {
  // Rows of the weight to ask for ahead of time: a strip is too narrow for the CPU to foresee.
  constexpr int64_t kAhead = 16;
  const at::BFloat16* const weight = o.weight + k * o.depth_stride + n0;
  Pairs pairs[kHalves];
  VNPU_UNROLL for (int j = 0; j < kHalves; ++j) {
    pairs[j] = interleave<kIsPair>(weight + kHalf * j, o.depth_stride, tile.mask[j]);
    _mm_prefetch(weight + kHalf * j + kAhead * o.depth_stride, _MM_HINT_T0);
    _mm_prefetch(weight + kHalf * j + (kAhead + 1) * o.depth_stride, _MM_HINT_T0);
  }
  add_pairs<kIsPair>(o, tile, o.rows + k, pairs);
}

// All rows of the result at once: the weight is read once, and goes from memory to the sums.
template <int kRows, int kHalves>
VNPU_TARGET void row_tile(const DecodeProduct& o, int64_t n0) {
  RowTile<kRows, kHalves> tile;
  clear(o, n0, tile);
  int64_t k = 0;
  for (; k + 1 < o.depth; k += 2) read_and_add<true>(o, tile, n0, k);
  if (k < o.depth) read_and_add<false>(o, tile, n0, k);
  finish(o, 0, n0, tile);
}

// A part of the weight, kBlockDepth rows and kBlockColumns columns, in the order of its use, for
// several tiles to read; and the sums of the tiles so far.
constexpr int64_t kBlockDepth = 256;
constexpr int kBlockHalves = 2;
constexpr int64_t kBlockColumns = kHalf * kBlockHalves;
struct alignas(64) Block {
  Pairs pairs[kBlockDepth / 2][kBlockHalves];
  PairedSums sums[kMostRows][kBlockHalves];
};

template <int kRows>
VNPU_TARGET void block_tile(const DecodeProduct& o, Block& block, int64_t m0, int64_t n0,
                            int64_t k0) {
  RowTile<kRows, kBlockHalves> tile;
  clear(o, n0, tile);
  if (k0 > 0) {
    VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
      VNPU_UNROLL for (int j = 0; j < kBlockHalves; ++j) tile.sums[i][j] = block.sums[m0 + i][j];
    }
  }
  const int64_t end = std::min(k0 + kBlockDepth, o.depth);
  const at::BFloat16* const row = o.rows + m0 * o.row_stride;
  int64_t k = k0;
  for (; k + 1 < end; k += 2) add_pairs<true>(o, tile, row + k, block.pairs[(k - k0) / 2]);
  if (k < end) add_pairs<false>(o, tile, row + k, block.pairs[(k - k0) / 2]);
  if (end == o.depth) {
    finish(o, m0, n0, tile);
  } else {
    VNPU_UNROLL for (int i = 0; i < kRows; ++i) {
      VNPU_UNROLL for (int j = 0; j < kBlockHalves; ++j) block.sums[m0 + i][j] = tile.sums[i][j];
    }
  }
}

template <bool kIsPair>
VNPU_TARGET inline __attribute__((always_inline)) void keep(const DecodeProduct& o,
                                                            const RowTile<1, kBlockHalves>& columns,
                                                            int64_t n0, int64_t k,
                                                            Pairs (&pairs)[kBlockHalves]) {
  const at::BFloat16* const weight = o.weight + k * o.depth_stride + n0;
  VNPU_UNROLL for (int j = 0; j < kBlockHalves; ++j) {
    pairs[j] = interleave<kIsPair>(weight + kHalf * j, o.depth_stride, columns.mask[j]);
  }
}

VNPU_TARGET void row_blocks(const DecodeProduct& o, int64_t n0) {
  Block block;  // 48 KB
  RowTile<1, kBlockHalves> columns;
  clear(o, n0, columns);
  for (int64_t k0 = 0; k0 < o.depth; k0 += kBlockDepth) {
    const int64_t end = std::min(k0 + kBlockDepth, o.depth);
    int64_t k = k0;
    for (; k + 1 < end; k += 2) keep<true>(o, columns, n0, k, block.pairs[(k - k0) / 2]);
    if (k < end) keep<false>(o, columns, n0, k, block.pairs[(k - k0) / 2]);
    int64_t m0 = 0;
    for (; m0 + kTileRows <= o.m; m0 += kTileRows) block_tile<kTileRows>(o, block, m0, n0, k0);
    switch (o.m - m0) {
      case 1: block_tile<1>(o, block, m0, n0, k0); break;
      case 2: block_tile<2>(o, block, m0, n0, k0); break;
      case 3: block_tile<3>(o, block, m0, n0, k0); break;
      case 4: block_tile<4>(o, block, m0, n0, k0); break;
      case 5: block_tile<5>(o, block, m0, n0, k0); break;
      default: break;
    }
  }
}

// Columns [begin, end) of a weight that is dense along its rows.
template <int kRows, int kHalves>
void row_tiles(const DecodeProduct& o, int64_t begin, int64_t end) {
  for (int64_t n0 = begin; n0 < end; n0 += kHalf * kHalves) row_tile<kRows, kHalves>(o, n0);
}

void row_strip(const DecodeProduct& o, int64_t begin, int64_t end) {
  switch (o.m) {  // as many columns at a time as the registers hold sums of
    case 1: row_tiles<1, 8>(o, begin, end); break;
    case 2: row_tiles<2, 4>(o, begin, end); break;
    case 3: row_tiles<3, 4>(o, begin, end); break;
    case 4: row_tiles<4, 2>(o, begin, end); break;
    case 5: row_tiles<5, 2>(o, begin, end); break;
    case 6: row_tiles<6, 2>(o, begin, end); break;
    default:
      for (int64_t n0 = begin; n0 < end; n0 += kBlockColumns) row_blocks(o, n0);
  }
}

// The columns of one strip, which is wide where a weight is large, so that what is read together
// lies together.
int64_t strip_columns(const DecodeProduct& o) {
  constexpr int64_t kLargeWeight = 1 << 20;  // elements; about what the CPU's caches hold
  return o.depth * o.n > kLargeWeight || o.m == 1 ? 256 : kBlockColumns;
}

void run_strip(const DecodeProduct& o, int64_t begin) {
  const int64_t end = std::min(begin + strip_columns(o), o.n);
  if (o.depth_stride != 1) {
    row_strip(o, begin, end);
  } else if (o.m == 1) {
    strip<1, 16>(o, begin, end);
  } else if (o.m == 2) {
    strip<2, 8>(o, begin, end);
  } else {
    strip<4, 4>(o, begin, end);
  }
}

int64_t strips(const DecodeProduct& o) { return (o.n + strip_columns(o) - 1) / strip_columns(o); }

bool is_dense_matrix(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 && (tensor.stride(-1) == 1 || tensor.size(-1) == 1);
}

}  // namespace

bool is_decode_product(const DecodeProduct& product) {
  return is_supported() && (product.depth_stride == 1 || product.column_stride == 1) &&
         product.m <= kMostRows && product.m > 0 && product.n > 0 && product.depth > 0;
}

void decode_products(c10::ArrayRef<DecodeProduct> products) {
  std::vector<int64_t> first(products.size() + 1);  // strip of each product
  int64_t work = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    first[i + 1] = first[i] + strips(products[i]);
    work += products[i].m * products[i].n * products[i].depth;
  }
  const int64_t count = first.back();
  if (count == 0) return;
  const int64_t grain = std::max<int64_t>(1, kGrainProducts * count / std::max<int64_t>(1, work));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    auto i = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), begin) -
                                 first.begin() - 1);
    for (int64_t s = begin; s < end; ++s) {
      while (s >= first[i + 1]) ++i;
      run_strip(products[i], (s - first[i]) * strip_columns(products[i]));
    }
  });
}

bool decode_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& out) {
  if (!is_dense_matrix(rows) || !is_dense_matrix(out) || rows.dim() != 2 || out.dim() != 2 ||
      weight.dim() != 2 || weight.scalar_type() != at::kBFloat16) {
    return false;
  }
  if (bias.defined() && (bias.scalar_type() != at::kBFloat16 || !bias.is_contiguous() ||
                         bias.numel() != weight.size(1))) {
    return false;
  }
  const DecodeProduct product{
      .rows = rows.const_data_ptr<at::BFloat16>(),
      .row_stride = rows.stride(0),
      .weight = weight.const_data_ptr<at::BFloat16>(),
      .depth_stride = weight.stride(0),
      .column_stride = weight.stride(1),
      .bias = bias.defined() ? bias.const_data_ptr<at::BFloat16>() : nullptr,
      .out = out.mutable_data_ptr<at::BFloat16>(),
      .out_stride = out.stride(0),
      .m = rows.size(0),
      .n = weight.size(1),
      .depth = rows.size(1)};
  if (!is_decode_product(product)) return false;
  decode_products(product);
  return true;
}

bool decode_batch_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& out) {
  if (rows.dim() != 3 || weight.dim() != 3 || out.dim() != 3 || !is_dense_matrix(rows) ||
      !is_dense_matrix(out) || weight.scalar_type() != at::kBFloat16 || rows.size(0) == 0 ||
      weight.size(0) != rows.size(0)) {
    return false;
  }
  std::vector<DecodeProduct> products(static_cast<size_t>(rows.size(0)),
                                      DecodeProduct{.rows = rows.const_data_ptr<at::BFloat16>(),
                                                    .row_stride = rows.stride(1),
                                                    .weight = weight.const_data_ptr<at::BFloat16>(),
                                                    .depth_stride = weight.stride(1),
                                                    .column_stride = weight.stride(2),
                                                    .out = out.mutable_data_ptr<at::BFloat16>(),
                                                    .out_stride = out.stride(1),
                                                    .m = rows.size(1),
                                                    .n = weight.size(2),
                                                    .depth = rows.size(2)});
  if (!is_decode_product(products.front())) return false;
  for (size_t b = 0; b < products.size(); ++b) {
    products[b].rows += static_cast<int64_t>(b) * rows.stride(0);
    products[b].weight += static_cast<int64_t>(b) * weight.stride(0);
    products[b].out += static_cast<int64_t>(b) * out.stride(0);
  }
  decode_products(products);
  return true;
}

#else

bool is_decode_product(const DecodeProduct&) { return false; }
void decode_products(c10::ArrayRef<DecodeProduct>) {}
bool decode_matmul(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return false;
}
bool decode_batch_matmul(const at::Tensor&, const at::Tensor&, const at::Tensor&) { return false; }

#endif

}  // namespace vnpu::ops
