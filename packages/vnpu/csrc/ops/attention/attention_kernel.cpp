#include "ops/attention/attention_kernel.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "ops/vector_width.h"

namespace vnpu::ops {

int64_t element_bytes(Element element) {
  switch (element) {
    case Element::kFloat: return 4;
    case Element::kBFloat16:
    case Element::kHalf: return 2;
    case Element::kInt8: return 1;
  }
  return 0;
}

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kTile = 64;  // keys that are handled at a time

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// A growing buffer per thread: pieces are small and many, so memory is kept between them.
float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    const auto bytes = static_cast<size_t>(round_up(floats, 16)) * sizeof(float);
    memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    size = floats;
  }
  return memory.get();
}

}  // namespace

// The same code for three widths of vector, chosen at run time: the library has to load on any
// x86-64.
#define VNPU_VECTOR_FLOATS 4
namespace baseline {
#include "ops/attention/attention_kernel_body.h"
}
#undef VNPU_VECTOR_FLOATS

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define VNPU_VECTOR_FLOATS 8
namespace avx2 {
#include "ops/attention/attention_kernel_body.h"
}
#undef VNPU_VECTOR_FLOATS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define VNPU_VECTOR_FLOATS 16
namespace avx512 {
#include "ops/attention/attention_kernel_body.h"
}
#undef VNPU_VECTOR_FLOATS
#pragma GCC pop_options
#define VNPU_WIDE_VECTORS 1
#endif

void attend_piece(const AttentionProblem& problem, const AttentionPiece& piece) {
#ifdef VNPU_WIDE_VECTORS
  static const auto best = [] {
    const int floats = vector_floats();
    return floats == 16 ? &avx512::attend : floats == 8 ? &avx2::attend : &baseline::attend;
  }();
  best(problem, piece);
#else
  baseline::attend(problem, piece);
#endif
}

}  // namespace vnpu::ops
