#pragma once

// The opaque handles of the aclnn interface.

#include <memory>
#include <vector>

#include "device/task.h"
#include "ops/values.h"

struct aclTensor {
  vnpu::ops::TensorView view;
  // The dimension along which an int32 holds eight of the 4-bit integers that were described.
  int int4_dimension = -1;
};
struct aclScalar {
  vnpu::ops::TypedScalar scalar;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclBoolArray {
  vnpu::ops::BoolArray values;
};
struct aclTensorList {  // owns its elements
  std::vector<const aclTensor*> tensors;
};
struct aclOpExecutor {
  vnpu::TaskPtr task;
  uint64_t workspace_bytes = 0;  // that its launch needs
};
