#include "ops/matmul/block_kernel.h"

#include "ops/vector_width.h"

namespace vnpu::ops {
namespace {

// The same code for two widths of vector, chosen at run time: the library has to load on any
// x86-64.
#define VNPU_VECTOR_FLOATS 4
namespace baseline {
#include "ops/matmul/block_kernel_body.h"
}
#undef VNPU_VECTOR_FLOATS

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define VNPU_VECTOR_FLOATS 8
namespace wide {
#include "ops/matmul/block_kernel_body.h"
}
#undef VNPU_VECTOR_FLOATS
#pragma GCC pop_options
#else
namespace wide = baseline;
#endif

template <class Element>
void multiply(const BlockProduct& product, const Element* rows, const Element* block, float* sums) {
  static const bool is_wide = vector_floats() >= 8;
  (is_wide ? wide::multiply<Element> : baseline::multiply<Element>)(product, rows, block, sums);
}

}  // namespace

void multiply_block(const BlockProduct& product, const float* rows, const float* block,
                    float* sums) {
  multiply(product, rows, block, sums);
}

void multiply_block(const BlockProduct& product, const at::BFloat16* rows,
                    const at::BFloat16* block, float* sums) {
  multiply(product, rows, block, sums);
}

}  // namespace vnpu::ops
