#include "ops/matmul/fractal_layout.h"

#include <algorithm>

#include "interface/status.h"
#include "ops/handles.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kTileRows = 16;

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

std::vector<int64_t> sizes_listed(const TensorView& view) {
  return {view.sizes, view.sizes + view.dims};
}

// [..., columns / C, rows / 16, 16, C] -> [..., rows, columns] with the padding.
Tensor untile(const Tensor& tiles) {
  const int64_t d = tiles.dim();
  std::vector<int64_t> sizes(tiles.sizes().begin(), tiles.sizes().end() - 4);
  sizes.push_back(tiles.size(-3) * tiles.size(-2));
  sizes.push_back(tiles.size(-4) * tiles.size(-1));
  return tiles.transpose(d - 4, d - 3).transpose(d - 3, d - 2).reshape(sizes);
}

}  // namespace

std::vector<int64_t> fractal_sizes(const std::vector<int64_t>& sizes, int64_t tile_columns) {
  if (sizes.size() < 2) {
    throw Failure(FailureKind::kOperatorInvalid,
                  "vnpu: FRACTAL_NZ lays out matrices; a tensor of " +
                      std::to_string(sizes.size()) + " dimensions has no such layout.");
  }
  std::vector<int64_t> tiles(sizes.begin(), sizes.end() - 2);
  tiles.push_back(divide_up(sizes.back(), tile_columns));
  tiles.push_back(divide_up(sizes[sizes.size() - 2], kTileRows));
  tiles.push_back(kTileRows);
  tiles.push_back(tile_columns);
  return tiles;
}

Tensor matrix_of_tiles(const Tensor& tiles, const std::vector<int64_t>& sizes) {
  Tensor all = untile(tiles);
  const size_t d = sizes.size();
  if (sizes[d - 2] > all.size(-2) || sizes[d - 1] > all.size(-1)) {
    refuse("a matrix of " + std::to_string(sizes[d - 2]) + " x " + std::to_string(sizes[d - 1]) +
           " does not fit into its tiles " + c10::str(tiles.sizes()));
  }
  return all.narrow(-2, 0, sizes[d - 2]).narrow(-1, 0, sizes[d - 1]).reshape(sizes);
}

void tiles_of_matrix(const Tensor& matrix, const Tensor& tiles) {
  const int64_t d = tiles.dim();
  const int64_t rows = tiles.size(-3) * tiles.size(-2);
  const int64_t columns = tiles.size(-4) * tiles.size(-1);
  const Tensor padded =
      at::constant_pad_nd(matrix, {0, columns - matrix.size(-1), 0, rows - matrix.size(-2)});
  std::vector<int64_t> sizes(tiles.sizes().begin(), tiles.sizes().end() - 4);
  for (const int64_t size : {tiles.size(-3), tiles.size(-2), tiles.size(-4), tiles.size(-1)}) {
    sizes.push_back(size);
  }
  tiles.copy_(padded.reshape(sizes).transpose(d - 3, d - 2).transpose(d - 4, d - 3));
}

TensorView memory_view(const TensorView& view) {
  if (view.format != kFormatFractalNz) return view;
  if (view.storage_dims < 4) {
    throw Failure(FailureKind::kOperatorInvalid,
                  "vnpu: a tensor in FRACTAL_NZ needs the sizes of its tiles "
                  "([..., columns / C, rows / 16, 16, C]); it came with " +
                      std::to_string(view.storage_dims) + " storage dimensions.");
  }
  TensorView memory = view;
  memory.offset = 0;
  memory.dims = view.storage_dims;
  int64_t step = 1;
  for (int i = view.storage_dims - 1; i >= 0; --i) {
    memory.sizes[i] = view.storage_sizes[i];
    memory.strides[i] = step;
    step *= view.storage_sizes[i];
  }
  return memory;
}

Tensor LaidOut::matrix() const {
  if (!is_fractal()) return memory;
  require(view.dims >= 2, "a tensor in FRACTAL_NZ must have at least 2 dimensions");
  // Described by its tiles, as in CANN's examples of grouped products: the matrix consists of whole
  // tiles.
  if (view.dims >= 4 && view.dims == memory.dim() && memory.sizes() == sizes_listed(view)) {
    return untile(memory);
  }
  const int64_t rows = view.sizes[view.dims - 2];
  const int64_t columns = view.sizes[view.dims - 1];
  const bool transposed = view.strides[view.dims - 1] != 1 && view.strides[view.dims - 2] == 1;
  const int64_t stored_rows = transposed ? columns : rows;
  const int64_t stored_columns = transposed ? rows : columns;
  Tensor all = untile(memory);
  if (stored_rows > all.size(-2) || stored_columns > all.size(-1)) {
    refuse("a matrix of " + std::to_string(stored_rows) + " x " + std::to_string(stored_columns) +
           " does not fit into its tiles " + c10::str(memory.sizes()));
  }
  all = all.narrow(-2, 0, stored_rows).narrow(-1, 0, stored_columns);
  // A slice of a batch of matrices starts at a multiple of the matrix's size.
  all = all.reshape({-1, stored_rows, stored_columns});
  const int64_t matrix_elements = std::max<int64_t>(1, stored_rows * stored_columns);
  const int64_t count = view.numel() / matrix_elements;
  const int64_t first = view.offset / matrix_elements;
  if (view.offset % matrix_elements != 0 || first + count > all.size(0)) {
    refuse("a view that starts inside a matrix in FRACTAL_NZ cannot be read");
  }
  all = all.narrow(0, first, count);
  if (transposed) all = all.transpose(-2, -1);
  return all.reshape(sizes_listed(view));
}

template <class T, bool kWrite>
typename LaidOutArgument<T, kWrite>::Kept LaidOutArgument<T, kWrite>::keep(C c, Launch& launch) {
  if (c == nullptr) launch.missing();
  const aclTensor memory{memory_view(c->view)};
  return {c->view, launch.view(&memory, kWrite, !kWrite)};
}
template struct LaidOutArgument<LaidOut, false>;
template struct LaidOutArgument<LaidOutOut, true>;

static void cost_of_npu_format_cast(const Call&, Work&) {}
VNPU_OPERATOR(NpuFormatCast, (const LaidOut& source, const LaidOutOut& target),
              {.tier = kT2, .cost = cost_of_npu_format_cast}) {
  const Tensor matrix = source.matrix();
  if (target.is_fractal()) {
    tiles_of_matrix(matrix, target.memory);
  } else {
    store(target.memory, matrix);
  }
}

}  // namespace vnpu::ops
