// Maps failures to HCCL's result codes.

#include "abi/hccl/communicator.h"

namespace vnpu::abi {

HcclResult result_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::kInvalidArgument:
    case FailureKind::kInvalidHandle:
    case FailureKind::kNoSuchDevice:
    case FailureKind::kIllegalAddress:
    case FailureKind::kOperatorInvalid:
    case FailureKind::kTilingRefused:
    case FailureKind::kCaptureConflict: return HCCL_E_PARA;
    case FailureKind::kOutOfMemory:
    case FailureKind::kTooManyStreams: return HCCL_E_OOM;
    case FailureKind::kTooManyEvents: return HCCL_E_OOM;
    case FailureKind::kWaitTimeout:
    case FailureKind::kRemoteTimeout: return HCCL_E_TIMEOUT;
    case FailureKind::kRemoteLost: return HCCL_E_REMOTE;
    case FailureKind::kNotSupported: return HCCL_E_NOT_SUPPORT;
    case FailureKind::kRace:
    case FailureKind::kDeviceNotSet:
    case FailureKind::kOperatorFailed: return HCCL_E_RUNTIME;
    case FailureKind::kInternal: return HCCL_E_INTERNAL;
  }
  return HCCL_E_INTERNAL;
}

}  // namespace vnpu::abi
