// Converts fp8 weights with a scale per block, as DeepSeek publishes them, on the host, while a
// checkpoint is loaded. torch would pass over the memory ten times, this passes once. Shapes and
// meaning: `vllm_davinci.operators`.

#include "host/block_fp8.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/bit_cast.h>

#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

// Compiled once per generation of processors, and chosen when the library is loaded.
#if defined(__x86_64__)
#define FOR_EACH_PROCESSOR \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace davinci {
namespace {

using at::Tensor;

constexpr int64_t kRowsAtOnce = 16;  // of one thread's chunk: some 100,000 values

// The value of a float8_e4m3fn.
inline __attribute__((always_inline)) float widened(uint8_t stored) {
  const uint32_t magnitude = stored & 0x7f, sign = static_cast<uint32_t>(stored & 0x80) << 24;
  // The exponent's bias is 127 instead of 7. Subnormal numbers are multiples of 2^-9.
  const uint32_t normal = (magnitude << 20) + (120U << 23);
  const uint32_t subnormal = c10::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9F);
  uint32_t bits = magnitude < 8 ? subnormal : normal;
  bits = magnitude == 0x7f ? 0x7fc00000U : bits;
  return c10::bit_cast<float>(bits | sign);
}

// Rounded to the nearest, halves to even.
inline __attribute__((always_inline)) uint16_t bfloat16_bits(float value) {
  const auto bits = c10::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

FOR_EACH_PROCESSOR void floats_of_row(const uint8_t* stored, const float* scale, int64_t size,
                                      float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = widened(stored[i]) * scale[i];
}

FOR_EACH_PROCESSOR void bfloat16_of_row(const uint8_t* stored, const float* scale, int64_t size,
                                        uint16_t* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = bfloat16_bits(widened(stored[i]) * scale[i]);
}

// Without signs, the bits of floats are ordered like their values.
FOR_EACH_PROCESSOR float largest_magnitude(const float* values, int64_t size) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t magnitude = c10::bit_cast<uint32_t>(values[i]) & 0x7fffffffU;
    largest = magnitude > largest ? magnitude : largest;
  }
  return c10::bit_cast<float>(largest);
}

FOR_EACH_PROCESSOR void integers_of_row(const float* values, float scale, int64_t size,
                                        int8_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    float level = std::nearbyintf(values[i] / scale);
    level = level > 127.0F ? 127.0F : level;
    level = level < -128.0F ? -128.0F : level;
    out[i] = static_cast<int8_t>(static_cast<int32_t>(level));
  }
}

struct Weight {
  const uint8_t* stored;
  const float* scale;
  int64_t rows, columns, block_rows, block_columns;

  // Fills `wide` with the scale of each column of `row`, unless it holds those of the row's block.
  void widen_scale(int64_t row, int64_t& block, std::vector<float>& wide) const {
    if (row / block_rows == block) return;
    block = row / block_rows;
    const float* own = scale + block * ((columns + block_columns - 1) / block_columns);
    for (int64_t column = 0; column < columns; ++column) wide[column] = own[column / block_columns];
  }

  // Calls function(row, its bytes, the scale of each column) for every row, on several threads.
  template <class Function>
  void for_each_row(Function function) const {
    at::parallel_for(0, rows, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      std::vector<float> wide(columns);
      int64_t block = -1;
      for (int64_t row = begin; row < end; ++row) {
        widen_scale(row, block, wide);
        function(row, stored + row * columns, wide.data());
      }
    });
  }
};

Weight checked(const Tensor& weight, const Tensor& scale, int64_t block_rows,
               int64_t block_columns) {
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat8_e4m3fn && scale.scalar_type() == at::kFloat,
                   "a weight of ", weight.scalar_type(), " with scales of ", scale.scalar_type(),
                   ": give float8_e4m3fn and float32");
  TORCH_CHECK_VALUE(block_rows > 0 && block_columns > 0, "blocks of ", block_rows, " x ",
                    block_columns, ": give sizes from 1");
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && scale.dim() == 2 && weight.is_contiguous() && scale.is_contiguous() &&
          scale.size(0) == (weight.size(0) + block_rows - 1) / block_rows &&
          scale.size(1) == (weight.size(1) + block_columns - 1) / block_columns,
      "a weight of sizes ", weight.sizes(), " with scales of sizes ", scale.sizes(),
      ": give contiguous ones, with a scale for each block of ", block_rows, " x ", block_columns);
  return {static_cast<const uint8_t*>(weight.const_data_ptr()),
          scale.const_data_ptr<float>(),
          weight.size(0),
          weight.size(1),
          block_rows,
          block_columns};
}

// A tensor in the memory of an unused tensor of `spares`, or in new memory, which costs a page
// fault for every 4 KiB: thousands for each weight.
Tensor made_in(at::TensorList spares, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
                     c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  for (const Tensor& spare : spares) {
    if (spare.storage().use_count() == 1 && spare.storage().nbytes() >= bytes) {
      return at::empty({0}, options).set_(spare.storage(), 0, sizes);
    }
  }
  return at::empty(sizes, options);
}

}  // namespace

Tensor block_fp8_floats(const Tensor& weight, const Tensor& scale, int64_t block_rows,
                        int64_t block_columns, at::ScalarType dtype, at::TensorList spares) {
  const Weight source = checked(weight, scale, block_rows, block_columns);
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16, "floats of ", dtype,
                   ": float32 and bfloat16 can be made");
  Tensor out = made_in(spares, weight.sizes(), weight.options().dtype(dtype));
  if (dtype == at::kFloat) {
    auto* to = out.mutable_data_ptr<float>();
    source.for_each_row([&](int64_t row, const uint8_t* stored, const float* wide) {
      floats_of_row(stored, wide, source.columns, to + row * source.columns);
    });
  } else {
    auto* to = static_cast<uint16_t*>(out.mutable_data_ptr());
    source.for_each_row([&](int64_t row, const uint8_t* stored, const float* wide) {
      bfloat16_of_row(stored, wide, source.columns, to + row * source.columns);
    });
  }
  return out;
}

std::tuple<Tensor, Tensor> block_fp8_integers(const Tensor& weight, const Tensor& scale,
                                              int64_t block_rows, int64_t block_columns,
                                              at::TensorList spares) {
  const Weight source = checked(weight, scale, block_rows, block_columns);
  Tensor integers = made_in(spares, weight.sizes(), weight.options().dtype(at::kChar));
  Tensor row_scale = at::empty({source.rows, 1}, weight.options().dtype(at::kFloat));
  auto* to = integers.mutable_data_ptr<int8_t>();
  auto* scales = row_scale.mutable_data_ptr<float>();
  source.for_each_row([&](int64_t row, const uint8_t* stored, const float* wide) {
    thread_local std::vector<float> values;
    values.resize(source.columns);
    floats_of_row(stored, wide, source.columns, values.data());
    const float range = largest_magnitude(values.data(), source.columns) / 127;
    scales[row] = range == 0 ? 1 : range;  // any scale serves a row of zeros
    integers_of_row(values.data(), scales[row], source.columns, to + row * source.columns);
  });
  return {integers, row_scale};
}

}  // namespace davinci
