#pragma once

// A tensor as an operator sees it: address, sizes and strides. Slices and transposes of a view are
// arithmetic on a few integers; each on an at::Tensor would be a call of torch's dispatcher, which
// takes as long as a launch.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <initializer_list>

namespace davinci {

inline constexpr int kMaxDims = 8;

struct View {
  void* storage = nullptr;       // base of the memory; element 0 is `offset` elements after it
  int64_t storage_elements = 0;  // elements that the memory holds
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes = {};
  std::array<int64_t, kMaxDims> strides = {};
  // Sizes of the memory of a tensor in a format of its own (NZ), else empty.
  int64_t format = 2;  // ACL_FORMAT_ND
  int storage_dims = 0;
  std::array<int64_t, kMaxDims> storage_sizes = {};

  static View of(const at::Tensor& tensor);
  // A view of `data` with row-major strides.
  static View over(void* data, at::ScalarType dtype, at::IntArrayRef sizes);

  int64_t size(int dim) const { return sizes[dim < 0 ? dim + dims : dim]; }
  int64_t numel() const;
  bool is_contiguous() const;

  // Sizes over the same elements; the view has to be contiguous.
  View reshaped(std::initializer_list<int64_t> new_sizes) const;
  View narrowed(int dim, int64_t start, int64_t length) const;
  View transposed(int first, int second) const;
  // With a dimension of size 1 before `dim`.
  View unsqueezed(int dim) const;
  // The last dimension divided into `new_sizes`, whose product it is.
  View split_last(int64_t outer, int64_t inner) const;
};

}  // namespace davinci
