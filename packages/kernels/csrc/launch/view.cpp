#include "launch/view.h"

#include <torch_npu/csrc/core/NPUStorageImpl.h>

#include <algorithm>

namespace davinci {
namespace {

constexpr int64_t kFractalNz = 29;  // ACL_FORMAT_FRACTAL_NZ
constexpr int64_t kNd = 2;          // ACL_FORMAT_ND

void set_row_major(View& view, at::IntArrayRef sizes) {
  TORCH_CHECK(sizes.size() <= kMaxDims, "a tensor of ", sizes.size(), " dimensions; at most ",
              kMaxDims, " are possible");
  view.dims = static_cast<int>(sizes.size());
  int64_t step = 1;
  for (int dim = view.dims - 1; dim >= 0; --dim) {
    view.sizes[dim] = sizes[dim];
    view.strides[dim] = step;
    step *= sizes[dim];
  }
}

}  // namespace

View View::of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1,
              "an operator of vllm_davinci got a tensor on ", tensor.device(),
              " among tensors on the NPU: move it with .npu()");
  View view;
  const c10::StorageImpl* const storage =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  view.storage = const_cast<void*>(storage->data());
  view.dtype = tensor.scalar_type();
  view.storage_elements = static_cast<int64_t>(storage->nbytes() / tensor.element_size());
  view.offset = tensor.storage_offset();
  view.dims = static_cast<int>(tensor.dim());
  TORCH_CHECK(view.dims <= kMaxDims, "a tensor of ", view.dims, " dimensions; at most ", kMaxDims,
              " are possible");
  std::copy_n(tensor.sizes().data(), view.dims, view.sizes.data());
  std::copy_n(tensor.strides().data(), view.dims, view.strides.data());
  const auto& description = static_cast<const torch_npu::NPUStorageImpl*>(storage)->npu_desc_;
  if (description.npu_format_ == kFractalNz) {
    view.format = kFractalNz;
    view.storage_dims = static_cast<int>(description.storage_sizes_.size());
    std::copy_n(description.storage_sizes_.data(), view.storage_dims, view.storage_sizes.data());
  }
  return view;
}

View View::over(void* data, at::ScalarType dtype, at::IntArrayRef sizes) {
  View view;
  view.storage = data;
  view.dtype = dtype;
  view.format = kNd;
  set_row_major(view, sizes);
  view.storage_elements = view.numel();
  return view;
}

int64_t View::numel() const {
  int64_t count = 1;
  for (int dim = 0; dim < dims; ++dim) count *= sizes[dim];
  return count;
}

bool View::is_contiguous() const {
  int64_t step = 1;
  for (int dim = dims - 1; dim >= 0; --dim) {
    if (sizes[dim] != 1 && strides[dim] != step) return false;
    step *= sizes[dim];
  }
  return true;
}

View View::reshaped(std::initializer_list<int64_t> new_sizes) const {
  View view = *this;
  set_row_major(view, at::IntArrayRef(new_sizes.begin(), new_sizes.size()));
  TORCH_CHECK(view.numel() == numel() && (is_contiguous() || numel() == 0),
              "sizes of a dense tensor of ", numel(), " elements cannot become ",
              at::IntArrayRef(new_sizes.begin(), new_sizes.size()));
  return view;
}

View View::narrowed(int dim, int64_t start, int64_t length) const {
  View view = *this;
  const int at = dim < 0 ? dim + dims : dim;
  TORCH_CHECK(start >= 0 && length >= 0 && start + length <= sizes[at], "entries ", start, " to ",
              start + length, " of a dimension of size ", sizes[at]);
  view.offset += start * strides[at];
  view.sizes[at] = length;
  return view;
}

View View::transposed(int first, int second) const {
  View view = *this;
  const int a = first < 0 ? first + dims : first;
  const int b = second < 0 ? second + dims : second;
  std::swap(view.sizes[a], view.sizes[b]);
  std::swap(view.strides[a], view.strides[b]);
  return view;
}

View View::unsqueezed(int dim) const {
  View view = *this;
  TORCH_CHECK(dims < kMaxDims, "a tensor of more than ", kMaxDims, " dimensions");
  const int at = dim < 0 ? dim + dims + 1 : dim;
  std::copy_backward(sizes.begin() + at, sizes.begin() + dims, view.sizes.begin() + dims + 1);
  std::copy_backward(strides.begin() + at, strides.begin() + dims, view.strides.begin() + dims + 1);
  view.sizes[at] = 1;
  view.strides[at] = at < dims ? sizes[at] * strides[at] : 1;
  view.dims = dims + 1;
  return view;
}

View View::split_last(int64_t outer, int64_t inner) const {
  TORCH_CHECK(dims > 0 && dims < kMaxDims && size(-1) == outer * inner, "a last dimension of size ",
              dims > 0 ? size(-1) : 0, " is not ", outer, " times ", inner);
  View view = *this;
  const int64_t step = strides[dims - 1];
  view.sizes[dims - 1] = outer;
  view.strides[dims - 1] = inner * step;
  view.sizes[dims] = inner;
  view.strides[dims] = step;
  view.dims = dims + 1;
  return view;
}

}  // namespace davinci
