// Images [.., H, W], sequences [.., W] and volumes [.., D, H, W] continued past their edges.

#include "ops/operator.h"

namespace vnpu::ops {

#define VNPU_PADDING(NAME, FUNCTION, ...)                                                    \
  VNPU_OPERATOR(NAME, (const Tensor& self, const IntArray& padding, Out out), __VA_ARGS__) { \
    store(out, FUNCTION(self, padding));                                                     \
  }

VNPU_PADDING(ReflectionPad1d, at::reflection_pad1d, {.tier = kOther, .cost = elements<8>})
VNPU_PADDING(ReflectionPad2d, at::reflection_pad2d, {.tier = kOther, .cost = elements<8>})
VNPU_PADDING(ReflectionPad3d, at::reflection_pad3d, {.tier = kOther, .cost = elements<8>})
VNPU_PADDING(ReplicationPad1d, at::replication_pad1d, {.tier = kOther, .cost = elements<8>})
VNPU_PADDING(ReplicationPad2d, at::replication_pad2d, {.tier = kOther, .cost = elements<8>})
VNPU_PADDING(ReplicationPad3d, at::replication_pad3d, {.tier = kOther, .cost = elements<8>})

}  // namespace vnpu::ops
