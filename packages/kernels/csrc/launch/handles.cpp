#include "launch/handles.h"

#include <c10/util/Exception.h>

#include "launch/symbols.h"

namespace davinci {
namespace {

struct Functions {
  template <class Signature>
  static Signature* find(const char* name) {
    return reinterpret_cast<Signature*>(find_symbol(name));
  }
  using Int64s = const int64_t*;
  aclTensor* (*create_tensor)(Int64s, uint64_t, int32_t, Int64s, int64_t, int32_t, Int64s, uint64_t,
                              void*) =
      find<aclTensor*(Int64s, uint64_t, int32_t, Int64s, int64_t, int32_t, Int64s, uint64_t,
                      void*)>("aclCreateTensor");
  aclTensorList* (*create_tensor_list)(const aclTensor* const*, uint64_t) =
      find<aclTensorList*(const aclTensor* const*, uint64_t)>("aclCreateTensorList");
  aclIntArray* (*create_int_array)(Int64s, uint64_t) =
      find<aclIntArray*(Int64s, uint64_t)>("aclCreateIntArray");
  aclScalar* (*create_scalar)(void*, int32_t) = find<aclScalar*(void*, int32_t)>("aclCreateScalar");
  int (*destroy_tensor)(const void*) = find<int(const void*)>("aclDestroyTensor");
  int (*destroy_tensor_list)(const void*) = find<int(const void*)>("aclDestroyTensorList");
  int (*destroy_int_array)(const void*) = find<int(const void*)>("aclDestroyIntArray");
  int (*destroy_scalar)(const void*) = find<int(const void*)>("aclDestroyScalar");
};

const Functions& functions() {
  static const Functions found;
  return found;
}

}  // namespace

// Source: aclDataType in acl_base.h.
int32_t acl_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return 0;
    case at::kHalf: return 1;
    case at::kChar: return 2;
    case at::kInt: return 3;
    case at::kByte: return 4;
    case at::kShort: return 6;
    case at::kLong: return 9;
    case at::kDouble: return 11;
    case at::kBool: return 12;
    case at::kBFloat16: return 27;
    default: TORCH_CHECK_TYPE(false, "operators of vllm_davinci do not take tensors of ", type);
  }
}

Handles::~Handles() {
  if (made_.empty()) return;
  const Functions& f = functions();
  for (const Made& made : made_) {
    switch (made.kind) {
      case Kind::kTensor: f.destroy_tensor(made.handle); break;
      case Kind::kTensorList: f.destroy_tensor_list(made.handle); break;
      case Kind::kIntArray: f.destroy_int_array(made.handle); break;
      case Kind::kScalar: f.destroy_scalar(made.handle); break;
    }
  }
}

template <class T>
T* Handles::keep(T* handle, Kind kind, const char* function) {
  TORCH_CHECK(handle != nullptr, function, " failed: the CANN log has the reason");
  if (made_.capacity() == 0) made_.reserve(64);
  made_.push_back({handle, kind});
  return handle;
}

static aclTensor* create(const View& view) {
  const bool own_format = view.storage_dims > 0;
  return functions().create_tensor(
      view.sizes.data(), static_cast<uint64_t>(view.dims), acl_type(view.dtype),
      view.strides.data(), view.offset, static_cast<int32_t>(view.format),
      own_format ? view.storage_sizes.data() : &view.storage_elements,
      own_format ? static_cast<uint64_t>(view.storage_dims) : 1, view.storage);
}

aclTensor* Handles::tensor(const View& view) {
  return keep(create(view), Kind::kTensor, "aclCreateTensor");
}

aclTensorList* Handles::tensor_list(std::initializer_list<View> views) {
  constexpr size_t kMost = 8;
  TORCH_CHECK(views.size() <= kMost, "a list of ", views.size(), " tensors");
  std::array<const aclTensor*, kMost> tensors;
  size_t count = 0;
  for (const View& view : views) {
    tensors[count] = create(view);
    TORCH_CHECK(tensors[count] != nullptr, "aclCreateTensor failed: the CANN log has the reason");
    ++count;
  }
  // Destroying the list destroys its elements.
  return keep(functions().create_tensor_list(tensors.data(), count), Kind::kTensorList,
              "aclCreateTensorList");
}

aclIntArray* Handles::ints(at::IntArrayRef values) {
  return keep(functions().create_int_array(values.data(), values.size()), Kind::kIntArray,
              "aclCreateIntArray");
}

aclScalar* Handles::scalar(double value) {
  return keep(functions().create_scalar(&value, acl_type(at::kDouble)), Kind::kScalar,
              "aclCreateScalar");
}

aclScalar* Handles::scalar(int64_t value) {
  return keep(functions().create_scalar(&value, acl_type(at::kLong)), Kind::kScalar,
              "aclCreateScalar");
}

}  // namespace davinci
