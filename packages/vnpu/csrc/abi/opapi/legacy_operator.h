#pragma once

// What libacl_op_compiler hands to the operators: one call of the older interface (aclop).

#include <cstddef>
#include <cstdint>

namespace vnpu::abi {

// A tensor as aclTensorDesc and aclDataBuffer describe it.
struct LegacyTensor {
  void* data;
  int32_t dtype;   // aclDataType
  int32_t format;  // aclFormat in which it lies in memory
  const int64_t* sizes;
  size_t dims;
  const int64_t* storage_sizes;  // in that format
  size_t storage_dims;
};

// `vnpuRunIdentity` of libopapi: `target` becomes `source` in its own format. Returns an aclError.
using RunIdentity = int(const LegacyTensor& source, const LegacyTensor& target, void* stream);

}  // namespace vnpu::abi
