#pragma once

#include <string>

#include "device/failure.h"
#include "device/fork.h"
#include "device/stream.h"

// Between the device and the C interfaces: exceptions become status codes and the recent error
// text.
namespace vnpu::abi {

// The aclError of a kind of failure. Numbers from kFirstStatus on are CANN's own statuses and
// returned unchanged.
constexpr int kFirstStatus = 100'000;
int status_of(FailureKind kind);
// Keeps the text for aclGetRecentErrMsg of this thread; returns the status.
int report(FailureKind kind, const std::string& message);
// For catch (...): reports the exception in flight. `where` is the C function's name.
int report_exception(const char* where);
// The newest nonzero status that a runtime call of this thread has returned since it was last
// taken. Refusals by operators (aclnn) do not count.
int peek_at_last_status();
int take_last_status();
// The text that aclGetRecentErrMsg returns; never null.
const char* recent_error();

// Refuses a call of a process that was forked after its devices had been opened.
int report_forked_copy(const char* where);

// Runs a C function's body.
template <class Body>
int guarded(const char* where, Body&& body) {
  if (is_forked_copy) [[unlikely]]
    return report_forked_copy(where);
  try {
    body();
    return 0;
  } catch (...) {
    return report_exception(where);
  }
}

// The stream behind an aclrtStream; null is the current device's default stream. Throws
// kInvalidHandle for a handle that is not a live stream.
const StreamPtr& stream_of(void* handle);
const EventPtr& event_of(void* handle);

}  // namespace vnpu::abi
