#pragma once

#include "abi/hccl/hccl_header.h"
#include "collective/element.h"
#include "collective/group.h"
#include "interface/status.h"

// Every C function of this library.
#define VNPU_HCCL(TYPE, NAME, PARAMETERS) \
  extern "C" __attribute__((visibility("default"))) TYPE NAME PARAMETERS

namespace vnpu::abi {

HcclResult result_of(FailureKind kind);

// Runs a C function's body; exceptions become a result and the recent error text.
template <class Body>
HcclResult hccl_guarded(const char* where, Body&& body) {
  FailureKind kind = FailureKind::kInternal;
  const int status = guarded(where, [&] {
    try {
      body();
    } catch (const Failure& failure) {
      kind = failure.kind;
      throw;
    }
  });
  return status == 0 ? HCCL_SUCCESS : result_of(kind);
}

// The group behind a communicator; throws kInvalidHandle if it is not a live one.
GroupPtr group_of(HcclComm communicator);

ElementType element_type(HcclDataType type);
Reduction reduction(HcclReduceOp operation);

// Queues a task on a stream.
void submit(aclrtStream stream, TaskPtr task);

}  // namespace vnpu::abi
