#pragma once

// Records that libmspti passes to its clients. The torch_npu wheel has no headers of it.
// Source: MindStudio's MSPTI API reference, msptiActivityKind and the records' pages.

#include <cstdint>

namespace vnpu::mspti {

enum Result : int {
  kSuccess = 0,
  kInvalidParameter = 1,
  kMultipleSubscribers = 2,
  kMaxLimitReached = 3,
  kQueueEmpty = 5,
  kInvalidKind = 8,
};

enum ActivityKind : int {
  kKernel = 2,
  kExternalCorrelation = 8,
  kCommunication = 9,
};

// Without padding inside; each record begins at a multiple of eight bytes.
#define VNPU_MSPTI_RECORD __attribute__((packed, aligned(8)))

struct VNPU_MSPTI_RECORD AnyRecord {
  int32_t kind;
};

struct VNPU_MSPTI_RECORD KernelRecord {
  int32_t kind = kKernel;
  uint64_t start;  // ns
  uint64_t end;
  uint32_t device;
  uint32_t stream;
  uint64_t correlation;
  const char* type;  // of the core
  const char* name;
};
static_assert(sizeof(KernelRecord) == 56);

struct VNPU_MSPTI_RECORD CommunicationRecord {
  int32_t kind = kCommunication;
  int32_t data_type;
  uint64_t count;  // elements
  uint32_t device;
  uint32_t stream;
  uint64_t start;  // ns
  uint64_t end;
  const char* algorithm;
  const char* name;
  const char* group;
  uint64_t correlation;
};
static_assert(sizeof(CommunicationRecord) == 72);

struct VNPU_MSPTI_RECORD ExternalCorrelationRecord {
  int32_t kind = kExternalCorrelation;
  int32_t external_kind;
  uint64_t external;
  uint64_t correlation;
};
static_assert(sizeof(ExternalCorrelationRecord) == 24);

}  // namespace vnpu::mspti
