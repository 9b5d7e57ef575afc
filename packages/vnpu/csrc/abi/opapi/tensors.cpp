// libopapi: creation and destruction of operators' arguments.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "device/checked_sizes.h"
#include "interface/status.h"
#include "ops/handles.h"

using namespace vnpu;

#define VNPU_C(TYPE) extern "C" __attribute__((visibility("default"))) TYPE

namespace {

template <class Make>
auto created(const char* function, Make&& make) -> decltype(make()) {
  try {
    if (is_forked_copy) throw Failure(FailureKind::kNotSupported, forked_copy_text(function));
    return make();
  } catch (...) {
    abi::report_exception(function);
    return nullptr;  // torch_npu turns a null handle into an error with the recent text
  }
}

// Returns null, with an error, for a null pointer to one or more values.
template <class Value, class Make>
auto listed(const char* function, const Value* values, uint64_t count, Make&& make)
    -> decltype(make()) {
  return created(function, [&]() -> decltype(make()) {
    if (values == nullptr && count > 0) {
      throw Failure(FailureKind::kOperatorInvalid, std::string("vnpu: ") + function + " of " +
                                                       std::to_string(count) +
                                                       " values at a null pointer.");
    }
    return make();
  });
}

// Pool of tensor descriptors. A destroyed one is reused instead of freed, so that a second
// destruction, as in CANN's own examples, is recognized.
class Tensors {
 public:
  static Tensors& instance() {
    static auto* const tensors = new Tensors();
    return *tensors;
  }
  aclTensor* make(const aclTensor& description) {
    const std::lock_guard lock(mutex_);
    Described* described = nullptr;
    if (unused_.empty()) {
      described = new Described;
    } else {
      described = unused_.back();
      unused_.pop_back();
    }
    described->tensor = description;
    described->is_live = true;
    return &described->tensor;
  }
  void drop(const aclTensor* tensor) {
    if (is_forked_copy) return;  // the lock may be held by a thread that stayed behind
    const std::lock_guard lock(mutex_);
    auto* const described = reinterpret_cast<Described*>(const_cast<aclTensor*>(tensor));
    if (described == nullptr || !std::exchange(described->is_live, false)) return;
    unused_.push_back(described);
  }

 private:
  struct Described {
    aclTensor tensor;  // first: programs' handles point to it
    bool is_live;
  };
  std::mutex mutex_;
  std::vector<Described*> unused_;
};

constexpr int32_t kInt4 = 29;  // aclDataType

// Describes 4-bit integers as operators take them: eight per int32, along the contiguous dimension.
void take_by_eights(aclTensor& tensor) {
  ops::TensorView& view = tensor.view;
  int packed = view.dims - 1;
  while (packed >= 0 && (view.strides[packed] != 1 || view.sizes[packed] % 8 != 0)) --packed;
  bool is_whole = packed >= 0 && view.offset % 8 == 0;
  for (int i = 0; i < view.dims; ++i) {
    is_whole = is_whole && (i == packed || view.sizes[i] == 1 || view.strides[i] % 8 == 0);
  }
  if (!is_whole) {
    throw Failure(FailureKind::kOperatorInvalid,
                  "vnpu: 4-bit integers are taken by eights: one dimension has to be contiguous, "
                  "its size and all distances multiples of 8.");
  }
  for (int i = 0; i < view.dims; ++i) {
    if (i != packed) view.strides[i] = std::max<int64_t>(1, view.strides[i] / 8);
  }
  view.sizes[packed] /= 8;
  view.offset /= 8;
  view.dtype = at::kInt;
  tensor.int4_dimension = packed;
  if (view.storage_dims > 0) view.storage_sizes[view.storage_dims - 1] /= 8;
}

}  // namespace

VNPU_C(aclTensor*)
aclCreateTensor(const int64_t* sizes, uint64_t dims, int32_t type, const int64_t* strides,
                int64_t offset, int32_t format, const int64_t* storage_sizes, uint64_t storage_dims,
                void* data) {
  return created("aclCreateTensor", [&] {
    if (dims > ops::kMaxDims || storage_dims > ops::kMaxDims) {
      throw Failure(FailureKind::kOperatorInvalid,
                    "vnpu: a tensor of " + std::to_string(std::max(dims, storage_dims)) +
                        " dimensions; at most " + std::to_string(ops::kMaxDims) + " are possible.");
    }
    aclTensor tensor;
    ops::TensorView& view = tensor.view;
    view.storage = data;
    view.offset = offset;
    view.dims = static_cast<int8_t>(dims);
    std::copy_n(sizes, dims, view.sizes);
    if (strides != nullptr) {
      std::copy_n(strides, dims, view.strides);
    } else {
      int64_t step = 1;
      for (int i = static_cast<int>(dims) - 1; i >= 0; --i) {
        view.strides[i] = step;
        step = checked_multiply(step, std::max<int64_t>(sizes[i], 1), "a tensor's stride",
                                FailureKind::kOperatorInvalid);
      }
    }
    view.format = format;
    view.storage_dims = static_cast<int8_t>(storage_dims);
    if (storage_sizes != nullptr) std::copy_n(storage_sizes, storage_dims, view.storage_sizes);
    if (type == kInt4) {
      take_by_eights(tensor);
    } else {
      view.dtype = ops::read_dtype(type);
    }
    view.check_sizes();
    return Tensors::instance().make(tensor);
  });
}
VNPU_C(aclScalar*) aclCreateScalar(void* value, int32_t type) {
  return created("aclCreateScalar", [&] {
    const at::ScalarType dtype = ops::read_dtype(type);
    const auto made = [&](at::Scalar number) { return new aclScalar{{number, dtype}}; };
    switch (dtype) {
      case at::kFloat: return made(*static_cast<float*>(value));
      case at::kDouble: return made(*static_cast<double*>(value));
      case at::kChar: return made(*static_cast<int8_t*>(value));
      case at::kInt: return made(*static_cast<int32_t*>(value));
      case at::kLong: return made(*static_cast<int64_t*>(value));
      case at::kBool: return made(*static_cast<bool*>(value));
      case at::kHalf: return made(*static_cast<at::Half*>(value));
      case at::kBFloat16: return made(*static_cast<at::BFloat16*>(value));
      case at::kComplexFloat: return made(*static_cast<c10::complex<float>*>(value));
      case at::kComplexDouble: return made(*static_cast<c10::complex<double>*>(value));
      default:
        throw Failure(FailureKind::kOperatorInvalid,
                      "vnpu: a scalar of aclDataType " + std::to_string(type) + " is not known.");
    }
  });
}
VNPU_C(aclIntArray*) aclCreateIntArray(const int64_t* values, uint64_t count) {
  return listed("aclCreateIntArray", values, count,
                [&] { return new aclIntArray{{values, values + count}}; });
}
VNPU_C(aclBoolArray*) aclCreateBoolArray(const bool* values, uint64_t count) {
  return listed("aclCreateBoolArray", values, count, [&] {
    auto* array = new aclBoolArray();
    array->values.assign(values, values + count);
    return array;
  });
}
VNPU_C(aclTensorList*) aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
  return listed("aclCreateTensorList", tensors, count,
                [&] { return new aclTensorList{{tensors, tensors + count}}; });
}
VNPU_C(int) aclDestroyTensor(const aclTensor* tensor) {
  Tensors::instance().drop(tensor);
  return 0;
}
#define VNPU_DESTROY(NAME, HANDLE)       \
  VNPU_C(int) NAME(const HANDLE* what) { \
    delete what;                         \
    return 0;                            \
  }
VNPU_DESTROY(aclDestroyScalar, aclScalar)
VNPU_DESTROY(aclDestroyIntArray, aclIntArray)
VNPU_DESTROY(aclDestroyBoolArray, aclBoolArray)
VNPU_DESTROY(vnpuDestroyExecutor, aclOpExecutor)  // called by libnnopbase's aclDestroyAclOpExecutor
VNPU_C(int) aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : list->tensors) Tensors::instance().drop(tensor);
  delete list;
  return 0;
}
VNPU_C(int) aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
  const ops::TensorView& view = tensor->view;
  *dims = static_cast<uint64_t>(view.dims);
  *sizes = new int64_t[static_cast<size_t>(view.dims)];  // the caller uses delete[]
  std::copy_n(view.sizes, view.dims, *sizes);
  if (tensor->int4_dimension >= 0) (*sizes)[tensor->int4_dimension] *= 8;
  return 0;
}
