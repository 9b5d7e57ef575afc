#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "device/touched.h"

namespace vnpu::ops {

constexpr int kMaxDims = 8;  // the most that an aclTensor carries

// The location of a tensor's elements in device memory: the content of an aclTensor, without owning
// it.
struct TensorView {
  void* storage = nullptr;  // device address of the storage's first byte
  int64_t offset = 0;       // elements from the storage to element 0
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // elements
  int8_t dims = 0;
  at::ScalarType dtype = at::kFloat;
  int32_t format = 2;  // aclFormat: 2 = ND, 29 = FRACTAL_NZ (storage_sizes then hold the layout)
  int64_t storage_sizes[kMaxDims] = {};
  int8_t storage_dims = 0;

  // Throws kOperatorInvalid unless the size in bytes, the distance of any two elements and their
  // addresses fit into 64 bits. All functions below require that. A check of a view also covers
  // views with fewer elements at the same distances.
  void check_sizes() const;
  int64_t numel() const;
  // [first, last) byte that any element touches, as device addresses; empty views touch nothing.
  std::pair<uintptr_t, uintptr_t> extent() const;
  // The bytes of the extent (whose first byte is `begin`) that belong to elements.
  Access::Layout layout(uintptr_t begin) const;
};

// The same elements as an ATen CPU tensor over the memory's backing. It owns nothing.
// `share_with`: a tensor made before from the same storage; they then share one at::Storage, so
// that ATen's own checks for overlap see what they would see on a CPU.
at::Tensor as_tensor(const TensorView& view, const at::Tensor* share_with = nullptr);

}  // namespace vnpu::ops
