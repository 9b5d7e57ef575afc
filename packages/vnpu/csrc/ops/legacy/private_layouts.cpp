// Source of the layouts: torch_npu/csrc/framework/FormatHelper.cpp.

#include "ops/legacy/private_layouts.h"

#include "ops/matmul/fractal_layout.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kBlock = 16;  // channels, or rows, that lie together

// aclFormat
constexpr int64_t kNchw = 0, kNc1hwc0 = 3, kFractalZ = 4, kNcdhw = 30, kNdc1hwc0 = 32,
                  kFractalZ3d = 33;

int64_t blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// [C], [C, H] and [C, H, W] stand for [1, C, H, W].
std::vector<int64_t> four(std::vector<int64_t> sizes) {
  if (sizes.size() < 4) sizes.insert(sizes.begin(), 1);
  sizes.resize(std::max<size_t>(sizes.size(), 4), 1);
  return sizes;
}

// How a layout stores a tensor: some dimensions are cut into blocks of 16, with zeros behind the
// last, and become two; then all are permuted.
struct Blocked {
  std::vector<int64_t> whole;   // sizes of the tensor: those of images or volumes
  std::vector<int64_t> filled;  // the same with whole blocks
  std::vector<int64_t> cut;
  std::vector<int64_t> order;

  Blocked(std::vector<int64_t> sizes, size_t first_cut, size_t end_cut, std::vector<int64_t> order)
      : whole(std::move(sizes)), order(std::move(order)) {
    for (size_t i = 0; i < whole.size(); ++i) {
      const int64_t size = whole[i];
      if (i >= first_cut && i < end_cut) {
        cut.insert(cut.end(), {blocks(size), kBlock});
        filled.push_back(blocks(size) * kBlock);
      } else {
        cut.push_back(size);
        filled.push_back(size);
      }
    }
  }
};

std::optional<Blocked> blocked(int64_t format, const std::vector<int64_t>& sizes) {
  const bool is_volume = sizes.size() == 5;
  const bool is_image = sizes.size() <= 4;
  if (format == kNc1hwc0 && is_image) return Blocked(four(sizes), 1, 2, {0, 1, 3, 4, 2});
  if (format == kFractalZ && is_image) return Blocked(four(sizes), 0, 2, {2, 4, 5, 0, 1, 3});
  if (format == kNdc1hwc0 && is_volume) return Blocked(sizes, 1, 2, {0, 3, 1, 4, 5, 2});
  if (format == kFractalZ3d && is_volume) return Blocked(sizes, 0, 2, {4, 2, 5, 6, 0, 1, 3});
  return std::nullopt;
}

bool is_plain(int64_t format) { return format == kFormatNd || format == kNchw || format == kNcdhw; }

[[noreturn]] void unknown(int64_t format, const std::vector<int64_t>& sizes) {
  refuse("aclFormat " + std::to_string(format) + " of a tensor of sizes " + c10::str(sizes) +
         " is not known here. Cast to ND, NCHW, NC1HWC0, FRACTAL_Z, FRACTAL_NZ, or of volumes to "
         "NCDHW, NDC1HWC0, FRACTAL_Z_3D.");
}

std::vector<int64_t> at_least_a_matrix(std::vector<int64_t> sizes) {
  sizes.resize(std::max<size_t>(sizes.size(), 2), 1);
  return sizes;
}

}  // namespace

Tensor plain_of(const Tensor& memory, int64_t format, const std::vector<int64_t>& sizes) {
  if (is_plain(format)) return memory.reshape(sizes);
  if (format == kFormatFractalNz) {
    return matrix_of_tiles(memory, at_least_a_matrix(sizes)).reshape(sizes);
  }
  const std::optional<Blocked> layout = blocked(format, sizes);
  if (!layout) unknown(format, sizes);
  std::vector<int64_t> stored;
  std::vector<int64_t> back(layout->order.size());
  for (size_t i = 0; i < layout->order.size(); ++i) {
    stored.push_back(layout->cut[static_cast<size_t>(layout->order[i])]);
    back[static_cast<size_t>(layout->order[i])] = static_cast<int64_t>(i);
  }
  Tensor all = memory.reshape(stored).permute(back).reshape(layout->filled);
  for (size_t i = 0; i < layout->whole.size(); ++i) {
    all = all.narrow(static_cast<int64_t>(i), 0, layout->whole[i]);
  }
  return all.reshape(sizes);
}

void lay_out(const Tensor& source, const Tensor& memory, int64_t format,
             const std::vector<int64_t>& sizes) {
  if (is_plain(format)) {
    memory.copy_(source.reshape(memory.sizes()));
    return;
  }
  if (format == kFormatFractalNz) {
    tiles_of_matrix(source.reshape(at_least_a_matrix(sizes)), memory);
    return;
  }
  const std::optional<Blocked> layout = blocked(format, sizes);
  if (!layout) unknown(format, sizes);
  const Tensor whole = source.reshape(layout->whole);
  std::vector<int64_t> padding;
  for (size_t i = layout->filled.size(); i-- > 0;) {
    padding.insert(padding.end(), {0, layout->filled[i] - layout->whole[i]});
  }
  const Tensor cut = at::constant_pad_nd(whole, padding).reshape(layout->cut);
  memory.copy_(cut.permute(layout->order).reshape(memory.sizes()));
}

}  // namespace vnpu::ops
