#pragma once

// The keys or values of an attention operator, in all their forms.

#include <optional>
#include <string>
#include <vector>

#include "ops/attention/attention.h"

namespace vnpu::ops {

// Scales and offsets of int8 rows as floats, and the begin of each request's.
struct Scales {
  Tensor scale, offset;
  Dequantization how;
  int64_t request_stride = 0;
};
// `mode` is CANN's antiquant mode; requests and block_size say what scales per token must cover.
Scales dequantization(const Tensor& scale, const Tensor* offset, int64_t mode, int64_t heads,
                      int64_t size, int64_t requests, int64_t block_size);

// Keys or values of all requests.
struct Source {
  std::vector<HeadView> views;  // one, or one per request
  RowSource rows;
  bool paged = false;
  std::optional<Scales> scales = {};

  // The rows of a request. `batch`: where they lie in a dense tensor, or which tensor of the list.
  RowSource of(int64_t request, int64_t batch, int64_t first_token) const;
};

Source dense_source(const std::vector<Tensor>& tensors, const std::string& layout, int64_t heads);
// A cache: [blocks, block_size, heads * size], [blocks, heads, block_size, size], or
// [blocks, heads, size / piece, block_size, piece].
Source paged_source(const Tensor& cache, int64_t heads, int64_t block_size);
// Keys with a prefix that all sequences share in front.
std::vector<Tensor> with_prefix(const TensorList& tensors, const OptionalTensor& prefix,
                                const OptionalIntArray& prefix_length, const std::string& layout);

}  // namespace vnpu::ops
