#pragma once

// The older operator interface's handles (aclop).

#include <string>
#include <vector>

#include "acl/acl_base.h"
#include "interface/legacy_call.h"

struct aclDataBuffer {
  void* data;
  size_t bytes;
};
struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> dims;
  std::string name;
  // Layout in memory.
  aclFormat storage_format;
  std::vector<int64_t> storage_dims;
  aclMemType placement = ACL_MEMTYPE_DEVICE;
};
struct aclopAttr {
  vnpu::abi::LegacyAttributes values;
};
