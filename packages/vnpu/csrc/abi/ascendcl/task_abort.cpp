// The end of tasks that a program gives up, and who is told of it.

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "collective/abandoned.h"

using namespace vnpu;
using abi::executor;
using abi::guarded;

namespace {

// rt_error_codes.h
constexpr auto kDeviceTaskAbort = static_cast<FailureKind>(107022);
constexpr auto kStreamAbort = static_cast<FailureKind>(107023);

struct Callback {
  aclrtDeviceTaskAbortCallback function;
  void* arguments;
};

struct Callbacks {
  std::mutex mutex;
  std::map<std::string, Callback> by_name;
};

Callbacks& callbacks() {
  static Callbacks* const all = new Callbacks();
  return *all;
}

void tell(int32_t device, aclrtDeviceTaskAbortStage stage, uint32_t timeout_ms) {
  std::vector<std::pair<std::string, Callback>> told;
  {
    const std::lock_guard lock(callbacks().mutex);
    told.assign(callbacks().by_name.begin(), callbacks().by_name.end());
  }
  for (const auto& [name, callback] : told) {
    const int32_t status = callback.function(device, stage, timeout_ms, callback.arguments);
    if (status == 0) continue;
    throw Failure(FailureKind::kInternal, "vnpu: the callback '" + name +
                                              "' for the end of tasks returned " +
                                              std::to_string(status));
  }
}

}  // namespace

VNPU_ACL(aclrtSetDeviceTaskAbortCallback,
         (const char* name, aclrtDeviceTaskAbortCallback callback, void* arguments)) {
  return guarded("aclrtSetDeviceTaskAbortCallback", [&] {
    if (name == nullptr) throw Failure(FailureKind::kInvalidArgument, "vnpu: regName is null.");
    const std::lock_guard lock(callbacks().mutex);
    if (callback == nullptr) {
      callbacks().by_name.erase(name);
    } else {
      callbacks().by_name.insert_or_assign(name, Callback{callback, arguments});
    }
  });
}

VNPU_ACL(aclrtDeviceTaskAbort, (int32_t device, uint32_t timeout_ms)) {
  return guarded("aclrtDeviceTaskAbort", [&] {
    System::instance().physical(device);
    tell(device, ACL_RT_DEVICE_TASK_ABORT_PRE, timeout_ms);
    Executor::Limit limit;
    if (timeout_ms > 0) limit = std::chrono::milliseconds(timeout_ms);
    const std::vector<TaskPtr> dropped = executor().abort_device(
        device,
        Failure(kDeviceTaskAbort, "vnpu: the tasks of device " + std::to_string(device) +
                                      " were given up by aclrtDeviceTaskAbort."),
        limit);
    leave_groups_of(dropped, "aclrtDeviceTaskAbort");
    tell(device, ACL_RT_DEVICE_TASK_ABORT_POST, timeout_ms);
  });
}

VNPU_ACL(aclrtStreamAbort, (aclrtStream stream)) {
  return guarded("aclrtStreamAbort", [&] {
    if (stream == nullptr) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: aclrtStreamAbort needs a stream; the default stream (null) is not "
                    "allowed.");
    }
    const StreamPtr& target = abi::stream_of(stream);
    const std::vector<TaskPtr> dropped = executor().abort(
        target,
        Failure(kStreamAbort, "vnpu: the tasks of stream " + std::to_string(target->id) +
                                  " were given up by aclrtStreamAbort."),
        std::nullopt);
    leave_groups_of(dropped, "aclrtStreamAbort");
  });
}
