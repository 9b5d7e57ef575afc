#pragma once

// FRACTAL_NZ, the layout in which the matrix unit reads weights: a matrix [rows, columns] as tiles
// of 16 rows, tile columns outermost, [batch..., columns / C, rows / 16, 16, C], padded with zeros.
// A tile's row has 32 bytes of 8-bit or 16-bit elements (C = 32 or 16); 32-bit elements use C = 16.

#include <cstdint>
#include <vector>

#include "ops/operator.h"

namespace vnpu::ops {

constexpr int32_t kFormatNd = 2;
constexpr int32_t kFormatFractalNz = 29;

// A tensor argument whose memory may lie in FRACTAL_NZ. Its sizes and strides are the matrix's own,
// as if it were dense; a transposed weight has them swapped over the same tiles.
struct LaidOut {
  TensorView view;  // the matrix
  Tensor memory;    // what lies in memory: the matrix, or its tiles
  bool is_fractal() const { return view.format == kFormatFractalNz; }
  // The matrix in row-major order: a copy when it lies in tiles.
  Tensor matrix() const;
};
struct LaidOutOut : LaidOut {};

// Sizes of the tiles of a matrix [batch..., rows, columns].
std::vector<int64_t> fractal_sizes(const std::vector<int64_t>& sizes, int64_t tile_columns);

// The matrix of `sizes` in tiles, and the tiles of a matrix, whose padding becomes zeros.
Tensor matrix_of_tiles(const Tensor& tiles, const std::vector<int64_t>& sizes);
void tiles_of_matrix(const Tensor& matrix, const Tensor& tiles);

// The view of all memory behind a tensor in FRACTAL_NZ, or the tensor's own view.
TensorView memory_view(const TensorView& view);

template <class T, bool kWrite>
struct LaidOutArgument {
  using C = const aclTensor*;
  using Kept = std::pair<TensorView, TensorView>;  // the matrix and its memory
  static Kept keep(C c, Launch& launch);
  static T value(const Kept& kept, Tensors& tensors) {
    T argument;
    argument.view = kept.first;
    argument.memory = tensors.make(kept.second);
    return argument;
  }
};
template <>
struct Argument<LaidOut> : LaidOutArgument<LaidOut, false> {};
template <>
struct Argument<LaidOutOut> : LaidOutArgument<LaidOutOut, true> {};

}  // namespace vnpu::ops
