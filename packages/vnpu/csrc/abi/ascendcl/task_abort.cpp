// Aborts of tasks by the program.

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

}  // namespace

VNPU_ACL(aclrtDeviceTaskAbort, (int32_t device, uint32_t timeout_ms)) {
  return guarded("aclrtDeviceTaskAbort", [&] {
    System::instance().physical(device);
    Executor::Limit limit;
    if (timeout_ms > 0) limit = std::chrono::milliseconds(timeout_ms);
    const std::vector<TaskPtr> dropped = executor().abort_device(
        device,
        Failure(kDeviceTaskAbort, "vnpu: the tasks of device " + std::to_string(device) +
                                      " were given up by aclrtDeviceTaskAbort."),
        limit);
    leave_groups_of(dropped, "aclrtDeviceTaskAbort");
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
