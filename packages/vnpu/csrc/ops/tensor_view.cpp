#include "ops/tensor_view.h"

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <string>

#include "device/checked_sizes.h"
#include "device/memory.h"

namespace vnpu::ops {

namespace {

constexpr FailureKind kInvalid = FailureKind::kOperatorInvalid;

// Elements of a shape. Overflow counts even where another dimension is empty.
int64_t checked_elements(const int64_t* sizes, int dims, const char* what) {
  int64_t elements = 1;
  for (int i = 0; i < dims; ++i) {
    if (sizes[i] < 0) {
      throw Failure(kInvalid, "vnpu: a tensor's dimension " + std::to_string(i) + " has size " +
                                  std::to_string(sizes[i]) + "; it has to be at least 0.");
    }
    elements = checked_multiply(elements, std::max<int64_t>(sizes[i], 1), what, kInvalid);
  }
  return elements;
}

}  // namespace

void TensorView::check_sizes() const {
  constexpr const char* kElements = "the number of a tensor's elements, in bytes,";
  constexpr const char* kStorage = "the size of a tensor's storage, in bytes,";
  constexpr const char* kReach = "the address of a tensor's element";
  const auto item = static_cast<int64_t>(at::elementSize(dtype));
  checked_multiply(checked_elements(sizes, dims, kElements), item, kElements, kInvalid);
  checked_multiply(checked_elements(storage_sizes, storage_dims, kStorage), item, kStorage,
                   kInvalid);
  int64_t low = offset;
  int64_t high = offset;
  for (int i = 0; i < dims; ++i) {
    const int64_t steps = std::max<int64_t>(sizes[i], 1) - 1;
    const int64_t reach = checked_multiply(steps, strides[i], kReach, kInvalid);
    int64_t& end = reach < 0 ? low : high;
    end = checked_add(end, reach, kReach, kInvalid);
  }
  const int64_t base = static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage));
  const int64_t first = checked_multiply(low, item, kReach, kInvalid);
  const int64_t last =
      checked_multiply(checked_add(high, int64_t{1}, kReach, kInvalid), item, kReach, kInvalid);
  checked_add(base, last, kReach, kInvalid);
  if (base + first < 0) refuse_size(kReach, kInvalid);
}

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
