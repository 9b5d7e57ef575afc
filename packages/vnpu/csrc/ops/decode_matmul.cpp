#include "ops/decode_matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

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
constexpr int64_t kGrainProducts = 1 << 20;  // multiply-adds worth a second thread

struct Operands {
  const at::BFloat16* rows;
  int64_t row_stride;
  const at::BFloat16* weight;  // column n starts at weight + n * column_stride
  int64_t column_stride;
  const at::BFloat16* bias;  // or null
  at::BFloat16* out;
  int64_t out_stride;
  int64_t m;
  int64_t n;
  int64_t depth;
};

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
VNPU_TARGET inline __attribute__((always_inline)) void tile(const Operands& o, int64_t m0,
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
VNPU_TARGET void strip(const Operands& o, int64_t begin, int64_t end) {
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

bool is_dense_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 2 && tensor.scalar_type() == at::kBFloat16 &&
         (tensor.stride(1) == 1 || tensor.size(1) == 1);
}

}  // namespace

bool decode_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                   const at::Tensor& out) {
  static const bool supported = __builtin_cpu_supports("avx512bf16") != 0 &&
                                __builtin_cpu_supports("avx512bw") != 0 &&
                                __builtin_cpu_supports("avx512vl") != 0;
  if (!supported || !is_dense_matrix(rows) || !is_dense_matrix(out) || weight.dim() != 2 ||
      weight.scalar_type() != at::kBFloat16 || weight.stride(0) != 1) {
    return false;
  }
  if (bias.defined() && (bias.scalar_type() != at::kBFloat16 || !bias.is_contiguous() ||
                         bias.numel() != weight.size(1))) {
    return false;
  }
  const Operands o{.rows = rows.const_data_ptr<at::BFloat16>(),
                   .row_stride = rows.stride(0),
                   .weight = weight.const_data_ptr<at::BFloat16>(),
                   .column_stride = weight.stride(1),
                   .bias = bias.defined() ? bias.const_data_ptr<at::BFloat16>() : nullptr,
                   .out = out.mutable_data_ptr<at::BFloat16>(),
                   .out_stride = out.stride(0),
                   .m = rows.size(0),
                   .n = weight.size(1),
                   .depth = rows.size(1)};
  if (o.m > kMostRows || o.m == 0 || o.n == 0 || o.depth == 0) return false;
  const int64_t strips = (o.n + kSums - 1) / kSums;
  const int64_t grain = std::max<int64_t>(1, kGrainProducts / (o.m * o.depth * kSums));
  at::parallel_for(0, strips, grain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kSums;
    const int64_t last = std::min(end * kSums, o.n);
    if (o.m == 1) {
      strip<1, 16>(o, first, last);
    } else if (o.m == 2) {
      strip<2, 8>(o, first, last);
    } else {
      strip<4, 4>(o, first, last);
    }
  });
  return true;
}

#else

bool decode_matmul(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  return false;
}

#endif

}  // namespace vnpu::ops
