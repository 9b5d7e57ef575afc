#pragma once

#include <stdexcept>
#include <string>

namespace vnpu {

// Kinds of failure, independent of CANN. The CANN layer maps each kind to a status code.
enum class FailureKind {
  kInvalidArgument,
  kInvalidHandle,
  kNoSuchDevice,
  kDeviceNotSet,
  kOutOfMemory,
  kIllegalAddress,   // address outside every live allocation, or a range that leaves it
  kOperatorInvalid,  // an operator refused its arguments
  kTilingRefused,    // arguments are well formed, but the operator has no way to compute them
  kOperatorFailed,   // an operator failed while it ran
  kWaitTimeout,
  kTooManyStreams,   // on one device
  kTooManyEvents,    // likewise
  kCaptureConflict,  // a call that a capturing stream does not allow
  kRemoteLost,       // another rank died
  kRemoteTimeout,    // another rank did not arrive in time
  kRace,             // two launches that nothing orders use the same memory
  kNotSupported,
  kInternal,
};

// An error of the virtual NPU. what() says what failed, the value seen and what to do next.
class Failure : public std::runtime_error {
 public:
  Failure(FailureKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  FailureKind kind;
};

}  // namespace vnpu
