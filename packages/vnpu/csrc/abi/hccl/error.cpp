// HCCL's codes of results: which a failure gets, and what they mean.

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

VNPU_HCCL(const char*, HcclGetErrorString, (HcclResult code)) {
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_PTR: return "empty pointer";
    case HCCL_E_MEMORY: return "memory error";
    case HCCL_E_INTERNAL: return "internal error";
    case HCCL_E_NOT_SUPPORT: return "not supported";
    case HCCL_E_NOT_FOUND: return "resource not found";
    case HCCL_E_UNAVAIL: return "resource unavailable";
    case HCCL_E_SYSCALL: return "system call error";
    case HCCL_E_TIMEOUT: return "timeout";
    case HCCL_E_OPEN_FILE_FAILURE: return "file cannot be opened";
    case HCCL_E_TCP_CONNECT: return "TCP connection error";
    case HCCL_E_ROCE_CONNECT: return "RoCE connection error";
    case HCCL_E_TCP_TRANSFER: return "TCP transfer error";
    case HCCL_E_ROCE_TRANSFER: return "RoCE transfer error";
    case HCCL_E_RUNTIME: return "runtime error";
    case HCCL_E_DRV: return "driver error";
    case HCCL_E_PROFILING: return "profiling error";
    case HCCL_E_CCE: return "CCE error";
    case HCCL_E_NETWORK: return "network error";
    case HCCL_E_AGAIN: return "try again";
    case HCCL_E_REMOTE: return "remote rank lost";
    case HCCL_E_SUSPENDING: return "communicator is suspending";
    case HCCL_E_OPRETRY_FAIL: return "retry failed";
    case HCCL_E_OOM: return "out of memory";
    case HCCL_E_RESERVED: break;
  }
  return "unknown error";
}
