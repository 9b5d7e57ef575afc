#include "ops/tensor_view.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "device/memory.h"

namespace vnpu::ops {

int64_t TensorView::numel() const {
  int64_t n = 1;
  for (int i = 0; i < dims; ++i) n *= sizes[i];
  return n;
}

std::pair<uintptr_t, uintptr_t> TensorView::extent() const {
  const auto base = reinterpret_cast<uintptr_t>(storage);
  if (numel() == 0) return {base, base};
  int64_t low = offset;
  int64_t high = offset;
  for (int i = 0; i < dims; ++i) {
    const int64_t reach = (sizes[i] - 1) * strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto item = static_cast<int64_t>(at::elementSize(dtype));
  return {base + static_cast<uintptr_t>(low * item),
          base + static_cast<uintptr_t>((high + 1) * item)};
}

Access::Layout TensorView::layout(uintptr_t begin) const {
  Access::Layout layout;
  layout.item = static_cast<int64_t>(at::elementSize(dtype));
  layout.first =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage) - begin) + offset * layout.item;
  for (int i = 0; i < dims; ++i) {
    if (sizes[i] == 1 || strides[i] == 0) continue;
    layout.sizes[layout.dims] = sizes[i];
    layout.strides[layout.dims++] = strides[i] * layout.item;
  }
  return layout;
}

at::Tensor as_tensor(const TensorView& view, const at::Tensor* share_with) {
  at::Storage storage;
  if (share_with != nullptr) {
    storage = share_with->storage();
  } else {
    // The storage's own size is not known here (torch_npu passes a flat size, others none), and
    // addresses were checked at launch: the size only has to cover every view.
    constexpr size_t kUnbounded = size_t{1} << 46;
    storage = at::Storage(at::Storage::use_byte_size_t(), kUnbounded,
                          at::DataPtr(Memory::instance().backing(static_cast<char*>(view.storage)),
                                      at::Device(at::kCPU)),
                          /*allocator=*/nullptr, /*resizable=*/false);
  }
  at::Tensor tensor = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), at::DispatchKeySet(at::DispatchKey::CPU),
      at::scalarTypeToTypeMeta(view.dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(view.offset);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(view.sizes, view.dims),
                                                      at::IntArrayRef(view.strides, view.dims));
  return tensor;
}

}  // namespace vnpu::ops
