#pragma once

// Statuses of queues and channels of tensors (acl_base_rt.h, rt_error_codes.h), which are not those
// of other calls for the same failures.

#include "device/message_queues.h"
#include "interface/status.h"

namespace vnpu::abi {

constexpr int kInvalidParameter = 100000;
constexpr int kFeatureUnsupported = 200006;
constexpr int kQueueEmpty = 207013;
constexpr int kQueueFull = 207014;
constexpr int kFailed = 500001;

constexpr size_t kMostNameBytes = 127;  // of queues and channels, without the end

inline void require_parameter(bool condition, const std::string& message) {
  if (!condition) throw Failure(static_cast<FailureKind>(kInvalidParameter), "vnpu: " + message);
}

// -1 waits on, 0 does not wait.
inline MessageQueues::Limit limit_of(int32_t timeout_ms) {
  if (timeout_ms < 0) return std::nullopt;
  return std::chrono::milliseconds(timeout_ms);
}

// What a push, or a pop, that was given up returns: an answer and no error, so without a text.
inline int status_of_wait(int status, bool is_done, int given_up) {
  return status != 0 || is_done ? status : given_up;
}

}  // namespace vnpu::abi
