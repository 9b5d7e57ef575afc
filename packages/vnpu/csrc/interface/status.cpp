#include "interface/status.h"

#include <deque>
#include <mutex>
#include <utility>

#include "device/call_site.h"
#include "device/capture.h"
#include "device/system.h"
#include "interface/handles.h"

namespace vnpu::abi {
namespace {

thread_local std::string recent;
thread_local int last_status = 0;

// aclnn's statuses: 161002, 361001, 561002.
bool is_of_operators(int status) { return status / 1000 % 100 == 61; }

int keep(int status) {
  if (!is_of_operators(status)) last_status = status;
  return status;
}

constexpr uint64_t kStreamMark = 0x766e7075'5374726d;
constexpr uint64_t kEventMark = 0x766e7075'45766e74;

template <class Pointer, uint64_t kMark>
struct Handles {
  struct Handle {
    uint64_t mark;
    Pointer target;
  };
  std::mutex mutex;
  // Reuses the oldest handle first, so that a handle does not return soon: torch_npu's threads
  // remove an event from their list only after destroying it.
  std::deque<Handle*> unused;
  static constexpr size_t kResting = 256;

  void* make(Pointer target) {
    std::lock_guard lock(mutex);
    Handle* handle = nullptr;
    if (unused.size() <= kResting) {
      handle = new Handle;
    } else {
      handle = unused.front();
      unused.pop_front();
    }
    handle->target = std::move(target);
    handle->mark = kMark;
    return handle;
  }
  void drop(void* raw) {
    std::lock_guard lock(mutex);
    auto* handle = static_cast<Handle*>(raw);
    handle->mark = 0;
    handle->target = nullptr;
    unused.push_back(handle);
  }
  static const Pointer& target(void* raw, const char* noun) {
    auto* handle = static_cast<Handle*>(raw);
    if (handle == nullptr || handle->mark != kMark) {
      throw Failure(FailureKind::kInvalidHandle, std::string("vnpu: this is not a live ") + noun +
                                                     " (destroyed before its last use?).");
    }
    return handle->target;
  }
};

using StreamHandles = Handles<StreamPtr, kStreamMark>;
using EventHandles = Handles<EventPtr, kEventMark>;

StreamHandles& streams() {
  static StreamHandles* const handles = new StreamHandles();
  return *handles;
}
EventHandles& events() {
  static EventHandles* const handles = new EventHandles();
  return *handles;
}

}  // namespace

int status_of(FailureKind kind) {
  if (static_cast<int>(kind) >= kFirstStatus) return static_cast<int>(kind);
  switch (kind) {  // acl_base_rt.h, rt_error_codes.h, aclnn status codes
    case FailureKind::kInvalidArgument: return 107000;  // parameter invalid
    case FailureKind::kInvalidHandle: return 107017;    // invalid handle
    case FailureKind::kNoSuchDevice: return 107001;     // invalid device id
    case FailureKind::kDeviceNotSet: return 107002;     // context null
    case FailureKind::kOutOfMemory: return 207001;      // memory allocation
    case FailureKind::kIllegalAddress: return 507015;   // AI core exception
    case FailureKind::kOperatorInvalid: return 161002;  // aclnn: parameter invalid
    case FailureKind::kTilingRefused: return 561002;    // aclnn: tiling failed
    case FailureKind::kOperatorFailed: return 507015;   // AI core exception
    case FailureKind::kWaitTimeout: return 507046;      // stream sync timeout
    case FailureKind::kTooManyStreams: return 207005;   // resource allocation failed
    case FailureKind::kTooManyEvents: return 207007;    // no event resource
    case FailureKind::kCaptureConflict: return 107027;  // stream is capturing
    case FailureKind::kRemoteLost: return 507056;       // link error
    case FailureKind::kRemoteTimeout: return 507048;    // HCCL execution timed out
    case FailureKind::kRace: return 507015;             // AI core exception
    case FailureKind::kNotSupported: return 207000;     // feature not supported
    case FailureKind::kInternal: return 507899;         // driver internal error
  }
  return 507899;
}

namespace {

int status_of(CaptureRule rule) {
  switch (rule) {                                       // rt_error_codes.h
    case CaptureRule::kDefaultStream: return 107031;    // implicit dependency of the default stream
    case CaptureRule::kCapturing: return 107027;        // stream is captured
    case CaptureRule::kNotCapturing: return 107029;     // stream is not in capture status
    case CaptureRule::kOtherOrigin: return 107036;      // not initiated in this stream
    case CaptureRule::kOtherThread: return 107038;      // threads of begin and end differ
    case CaptureRule::kOtherGraph: return 107032;       // capture conflict
    case CaptureRule::kUnjoined: return 107025;         // stream unjoined
    case CaptureRule::kHostWait: return 107030;         // mode does not support the call
    case CaptureRule::kSynchronousCopy: return 107030;  // likewise
    case CaptureRule::kGroup: return 107033;            // task group status
    case CaptureRule::kGroupInterrupted: return 107034;  // task group interrupted
    case CaptureRule::kUpdate: return 107040;            // model update failed
    case CaptureRule::kRunning: return 107037;           // model is running
  }
  return 107027;
}

}  // namespace

int report(FailureKind kind, const std::string& message) {
  recent = message;
  return keep(status_of(kind));
}

int report_exception(const char* where) {
  try {
    throw;
  } catch (const CaptureFailure& failure) {
    // No lock is held here, as asking Python needs.
    const std::string site = python_call_site();
    recent = std::string(failure.what()) + " [" + where + "]" +
             (site.empty() ? "" : "\n  Called at" + site);
    return keep(status_of(failure.rule));
  } catch (const Failure& failure) {
    return report(failure.kind, std::string(failure.what()) + " [" + where + "]");
  } catch (const std::bad_alloc&) {
    return report(FailureKind::kOutOfMemory,
                  std::string("vnpu: the host is out of memory. [") + where + "]");
  } catch (const std::exception& e) {
    return report(FailureKind::kInternal, std::string("vnpu: ") + e.what() + " [" + where + "]");
  }
}

int report_forked_copy(const char* where) {
  // Not "not supported", which torch_npu passes over: this process has no context.
  return report(FailureKind::kDeviceNotSet, forked_copy_text(where));
}

int peek_at_last_status() { return last_status; }
int take_last_status() { return std::exchange(last_status, 0); }

const char* recent_error() { return recent.c_str(); }

void* make_handle(StreamPtr stream) { return streams().make(std::move(stream)); }
void* make_handle(EventPtr event) { return events().make(std::move(event)); }
void drop_stream_handle(void* handle) { streams().drop(handle); }
void drop_event_handle(void* handle) { events().drop(handle); }

const StreamPtr& stream_of(void* handle) {
  if (handle == nullptr) {
    System& system = System::instance();
    return system.default_stream(system.require_current_device());
  }
  return StreamHandles::target(handle, "stream");
}

const EventPtr& event_of(void* handle) { return EventHandles::target(handle, "event"); }

}  // namespace vnpu::abi
