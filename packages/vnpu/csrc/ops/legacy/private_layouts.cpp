#include "ops/legacy/private_layouts.h"

#include "ops/matmul/fractal_layout.h"

namespace vnpu::ops {
namespace {

bool is_plain(int64_t format) {
  constexpr int64_t kNchw = 0, kNcdhw = 30;  // aclFormat
  return format == kFormatNd || format == kNchw || format == kNcdhw;
}

void require_fractal(int64_t format, const std::vector<int64_t>& sizes) {
  if (format == kFormatFractalNz) return;
  refuse("aclFormat " + std::to_string(format) + " of a tensor of sizes " + c10::str(sizes) +
         " is not known here. Cast to ND, NCHW, NCDHW or FRACTAL_NZ.");
}

std::vector<int64_t> at_least_a_matrix(std::vector<int64_t> sizes) {
  sizes.resize(std::max<size_t>(sizes.size(), 2), 1);
  return sizes;
}

}  // namespace

Tensor plain_of(const Tensor& memory, int64_t format, const std::vector<int64_t>& sizes) {
  if (is_plain(format)) return memory.reshape(sizes);
  require_fractal(format, sizes);
  return matrix_of_tiles(memory, at_least_a_matrix(sizes)).reshape(sizes);
}

void lay_out(const Tensor& source, const Tensor& memory, int64_t format,
             const std::vector<int64_t>& sizes) {
  if (is_plain(format)) {
    memory.copy_(source.reshape(memory.sizes()));
    return;
  }
  require_fractal(format, sizes);
  tiles_of_matrix(source.reshape(at_least_a_matrix(sizes)), memory);
}

}  // namespace vnpu::ops
