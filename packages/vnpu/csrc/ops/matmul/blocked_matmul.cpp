#include "ops/matmul/blocked_matmul.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <vector>

#include "ops/float_rows.h"
#include "ops/matmul/block_kernel.h"

namespace vnpu::ops {
namespace {

// Rows of one kernel call. There is a kernel for each number of rows, so this bounds their number.
constexpr int64_t kBlockRows = 64;
constexpr int64_t kMostColumns = 64;  // of a block
// Multiply-adds worth a second thread: about 0.1 ms of one core, since a sleeping thread takes up
// to half of that to wake up.
constexpr int64_t kGrainBFloat16 = 1 << 24;
constexpr int64_t kGrainFloat = 1 << 22;

// oneDNN makes these kernels for x86-64 with AVX-512; ONEDNN_MAX_CPU_ISA may forbid them.
bool has_onednn_kernels() {
  static const bool found = [] {
    alignas(64) at::BFloat16 ones[2 * Blocking::kLanes];
    alignas(64) float sums[Blocking::kLanes] = {};
    std::fill(std::begin(ones), std::end(ones), 1.0F);
    try {
      at::native::cpublas::brgemm(1, Blocking::kLanes, 2, 2, Blocking::kLanes, Blocking::kLanes,
                                  false, ones, ones, sums);
      at::native::cpublas::brgemm_release();
    } catch (const std::exception&) {
      return false;
    }
    return sums[0] == 2.0F;
  }();
  return found;
}

// Aligned memory of the calling thread; buffers that are needed at the same time differ in `use`.
enum class Use { kBlock, kRows, kSums };
template <class T>
T* scratch(Use use, int64_t count) {
  thread_local std::vector<at::DataPtr> memory(3);
  thread_local std::vector<size_t> sizes(3);
  const auto slot = static_cast<size_t>(use);
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  if (sizes[slot] < bytes) {
    memory[slot] = at::DataPtr();
    memory[slot] = c10::GetCPUAllocator()->allocate(bytes);
    sizes[slot] = bytes;
  }
  return static_cast<T*>(memory[slot].get());
}

// A product whose rows have the kernel's layout, and its weight's blocks if they are cached.
struct Prepared {
  BlockedProduct product;
  Blocking blocking;
  Blocks blocks;
  at::Tensor rows;  // owns what product.rows points to, where those had to be copied
};

Prepared prepare(const BlockedProduct& product) {
  const Blocking blocking(product.weight);
  Prepared prepared{product, blocking, BlockedWeights::instance().find(product.weight, blocking),
                    at::Tensor()};
  // float16 is widened; the padding that completes a pair of rows of the weight meets zeros.
  if (product.weight.dtype != blocking.dtype || product.weight.depth != blocking.depth) {
    const at::Tensor given =
        at::from_blob(const_cast<void*>(product.rows), {product.m, product.weight.depth},
                      {product.row_stride, 1}, at::TensorOptions(product.weight.dtype));
    prepared.rows = at::zeros({product.m, blocking.depth}, at::TensorOptions(blocking.dtype));
    prepared.rows.narrow(1, 0, product.weight.depth).copy_(given);
    prepared.product.rows = prepared.rows.const_data_ptr();
    prepared.product.row_stride = blocking.depth;
  }
  return prepared;
}

// Element is what is multiplied, Stored what the operands hold.
template <class Element, class Stored>
void run_block(const Prepared& prepared, int64_t block) {
  const BlockedProduct& o = prepared.product;
  const Blocking& blocking = prepared.blocking;
  const int64_t width = blocking.width(block);
  const int64_t step = blocking.padded_width(block);
  const int64_t first = block * blocking.columns;
  const std::byte* weight = nullptr;
  if (prepared.blocks != nullptr) {
    weight = prepared.blocks.get() + static_cast<size_t>(block) * blocking.block_bytes;
  } else {
    auto* const own = scratch<std::byte>(Use::kBlock, static_cast<int64_t>(blocking.block_bytes));
    write_block(o.weight, blocking, block, own);
    weight = own;
  }
  float bias[kMostColumns] = {};
  if (o.bias != nullptr) float_rows::load(static_cast<const Stored*>(o.bias) + first, bias, width);
  auto* const sums = scratch<float>(Use::kSums, kBlockRows * kMostColumns);
  for (int64_t m0 = 0; m0 < o.m; m0 += kBlockRows) {
    const int64_t m = std::min(kBlockRows, o.m - m0);
    const auto* const rows = static_cast<const Element*>(o.rows) + m0 * o.row_stride;
    const auto* const block_of_weight = reinterpret_cast<const Element*>(weight);
    if (has_onednn_kernels()) {
      at::native::cpublas::brgemm(m, step, blocking.depth, o.row_stride, step, step, false, rows,
                                  block_of_weight, sums, std::is_same_v<Element, at::BFloat16>);
    } else {
      multiply_block(
          {.rows = m, .columns = step, .depth = blocking.depth, .row_stride = o.row_stride}, rows,
          block_of_weight, sums);
    }
    for (int64_t i = 0; i < m; ++i) {
      float* const row = sums + i * step;
      if (o.bias != nullptr) float_rows::add(row, bias, row, width);
      float_rows::store(row, static_cast<Stored*>(o.out) + (m0 + i) * o.out_stride + first, width);
    }
  }
}

void run_block(const Prepared& prepared, int64_t block) {
  switch (prepared.product.weight.dtype) {
    case at::kBFloat16: run_block<at::BFloat16, at::BFloat16>(prepared, block); return;
    case at::kHalf: run_block<float, at::Half>(prepared, block); return;
    default: run_block<float, float>(prepared, block);
  }
}

bool is_dense_within_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1;
}

Weight weight_of(const at::Tensor& matrix) {
  const int64_t d = matrix.dim();
  return {matrix.const_data_ptr(), matrix.scalar_type(), matrix.size(d - 2),
          matrix.size(d - 1),      matrix.stride(d - 2), matrix.stride(d - 1)};
}

}  // namespace

bool is_blocked_product(const BlockedProduct& product) {
  const Weight& weight = product.weight;
  const bool is_known =
      weight.dtype == at::kBFloat16 || weight.dtype == at::kHalf || weight.dtype == at::kFloat;
  return is_known && (weight.depth_stride == 1 || weight.column_stride == 1) && product.m > 0 &&
         weight.columns > 0 && weight.depth > 0;
}

bool blocked_products(c10::ArrayRef<BlockedProduct> products) {
  std::vector<Prepared> prepared;
  prepared.reserve(products.size());
  std::vector<int64_t> first{0};  // block of each product, counted through
  double grains = 0;
  for (const BlockedProduct& product : products) {
    prepared.push_back(prepare(product));
    first.push_back(first.back() + prepared.back().blocking.blocks);
    const bool is_short = prepared.back().blocking.dtype == at::kBFloat16;
    grains += static_cast<double>(product.m * product.weight.columns * product.weight.depth) /
              static_cast<double>(is_short ? kGrainBFloat16 : kGrainFloat);
  }
  const int64_t count = first.back();
  if (count == 0) return true;
  const auto grain = std::max<int64_t>(
      1, static_cast<int64_t>(static_cast<double>(count) / std::max(grains, 1.0)));
  const auto run = [&](int64_t begin, int64_t end) {
    auto i = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), begin) -
                                 first.begin() - 1);
    for (int64_t block = begin; block < end; ++block) {
      while (block >= first[i + 1]) ++i;
      run_block(prepared[i], block - first[i]);
    }
    // Tiles stay configured until then.
    if (has_onednn_kernels()) at::native::cpublas::brgemm_release();
  };
  try {
    at::parallel_for(0, count, grain, run);
  } catch (const std::exception&) {  // dnnl::error, whose header is not everywhere
    return false;
  }
  return true;
}

bool blocked_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
                    const at::Tensor& out) {
  const at::ScalarType dtype = weight.scalar_type();
  if (rows.dim() != 2 || weight.dim() != 2 || out.dim() != 2 || rows.scalar_type() != dtype ||
      out.scalar_type() != dtype || !is_dense_within_rows(rows) || !is_dense_within_rows(out)) {
    return false;
  }
  if (bias.defined() &&
      (bias.scalar_type() != dtype || !bias.is_contiguous() || bias.numel() != weight.size(1))) {
    return false;
  }
  const BlockedProduct product{.rows = rows.const_data_ptr(),
                               .row_stride = rows.stride(0),
                               .weight = weight_of(weight),
                               .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                               .out = out.mutable_data_ptr(),
                               .out_stride = out.stride(0),
                               .m = rows.size(0)};
  if (!is_blocked_product(product)) return false;
  return blocked_products(product);
}

bool blocked_batch_matmul(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& out) {
  const at::ScalarType dtype = weight.scalar_type();
  if (rows.dim() != 3 || weight.dim() != 3 || out.dim() != 3 || rows.scalar_type() != dtype ||
      out.scalar_type() != dtype || !is_dense_within_rows(rows) || !is_dense_within_rows(out) ||
      rows.size(0) == 0 || weight.size(0) != rows.size(0)) {
    return false;
  }
  const auto matrix = [item = static_cast<int64_t>(rows.element_size())](
                          auto* data, const at::Tensor& of, int64_t index) {
    return reinterpret_cast<decltype(data)>(reinterpret_cast<uintptr_t>(data) +
                                            static_cast<uintptr_t>(index * of.stride(0) * item));
  };
  const BlockedProduct first{.rows = rows.const_data_ptr(),
                             .row_stride = rows.stride(1),
                             .weight = weight_of(weight),
                             .out = out.mutable_data_ptr(),
                             .out_stride = out.stride(1),
                             .m = rows.size(1)};
  if (!is_blocked_product(first)) return false;
  std::vector<BlockedProduct> products(static_cast<size_t>(rows.size(0)), first);
  for (int64_t b = 0; b < rows.size(0); ++b) {
    BlockedProduct& product = products[static_cast<size_t>(b)];
    product.rows = matrix(first.rows, rows, b);
    product.weight.data = matrix(first.weight.data, weight, b);
    product.out = matrix(first.out, out, b);
  }
  return blocked_products(products);
}

at::Tensor multiply_rows(const at::Tensor& rows, const at::Tensor& weight) {
  if (rows.dim() == weight.dim() && (rows.dim() == 2 || rows.dim() == 3) &&
      rows.size(-1) == weight.size(-2)) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes.back() = weight.size(-1);
    const at::Tensor out = at::empty(sizes, rows.options());
    if (rows.dim() == 2 ? blocked_matmul(rows, weight, /*bias=*/at::Tensor(), out)
                        : blocked_batch_matmul(rows, weight, out)) {
      return out;
    }
  }
  return at::matmul(rows, weight);
}

}  // namespace vnpu::ops
