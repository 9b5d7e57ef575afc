// What a program marks in a profile that is being taken: instants, spans and steps. Source:
// hicann/runtime docs/zh/api_ref/19-02 and 19-04.

#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "acl/acl_prof.h"
#include "trace/device_profile.h"

using vnpu::Failure;
using vnpu::FailureKind;
using vnpu::abi::guarded;
using vnpu::trace::DeviceProfile;

struct aclprofStepInfo {
  int64_t begin = -1;
  uint64_t number = 0;
};

namespace {

struct Stamp {
  std::string message;
  int64_t begin = 0;
  int thread = 0;
};

struct Marks {
  std::mutex mutex;
  std::set<const void*> stamps;
  std::map<uint32_t, Stamp> ranges;  // that are open
  uint32_t next_range = 1;
  uint64_t steps = 0;
};

Marks& marks() {
  static auto* state = new Marks;  // outlives the threads that end with the process
  return *state;
}

thread_local std::vector<Stamp> pushed;

[[noreturn]] void refuse(const std::string& message) {
  throw Failure(FailureKind::kInvalidArgument, "vnpu: " + message);
}

// Of a live stamp, begun now on this thread.
Stamp begun(const void* stamp) {
  Marks& state = marks();
  const std::lock_guard lock(state.mutex);
  if (state.stamps.count(stamp) == 0) {
    refuse("this is no stamp that aclprofCreateStamp has made and nobody has destroyed.");
  }
  return {static_cast<const Stamp*>(stamp)->message, DeviceProfile::now(), ::gettid()};
}

void end(const Stamp& stamp) {
  DeviceProfile::add({stamp.message, stamp.thread, stamp.begin, DeviceProfile::now()});
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void* aclprofCreateStamp() {
  auto* const stamp = new Stamp;
  Marks& state = marks();
  const std::lock_guard lock(state.mutex);
  state.stamps.insert(stamp);
  return stamp;
}
extern "C" __attribute__((visibility("default"))) void aclprofDestroyStamp(void* stamp) {
  Marks& state = marks();
  const std::lock_guard lock(state.mutex);
  if (state.stamps.erase(stamp) != 0) delete static_cast<Stamp*>(stamp);
}
VNPU_ACL(aclprofSetStampTraceMessage, (void* stamp, const char* text, uint32_t length)) {
  return guarded("aclprofSetStampTraceMessage", [&] {
    begun(stamp);
    if (text == nullptr) refuse("a stamp's message is missing.");
    static_cast<Stamp*>(stamp)->message.assign(text, length);
  });
}
VNPU_ACL(aclprofMark, (void* stamp)) {
  return guarded("aclprofMark", [&] {
    const Stamp now = begun(stamp);
    DeviceProfile::add({now.message, now.thread, now.begin, now.begin});
  });
}
VNPU_ACL(aclprofPush, (void* stamp)) {
  return guarded("aclprofPush", [&] { pushed.push_back(begun(stamp)); });
}
VNPU_ACL(aclprofPop, ()) {
  return guarded("aclprofPop", [&] {
    if (pushed.empty()) refuse("aclprofPop without an aclprofPush of this thread before it.");
    end(pushed.back());
    pushed.pop_back();
  });
}
VNPU_ACL(aclprofRangeStart, (void* stamp, uint32_t* range)) {
  return guarded("aclprofRangeStart", [&] {
    if (range == nullptr) refuse("aclprofRangeStart has no place for the range's number.");
    const Stamp opened = begun(stamp);
    Marks& state = marks();
    const std::lock_guard lock(state.mutex);
    *range = state.next_range++;
    state.ranges[*range] = opened;
  });
}
VNPU_ACL(aclprofRangeStop, (uint32_t range)) {
  return guarded("aclprofRangeStop", [&] {
    Marks& state = marks();
    const std::lock_guard lock(state.mutex);
    const auto found = state.ranges.find(range);
    if (found == state.ranges.end()) {
      refuse("range " + std::to_string(range) + " is none that aclprofRangeStart has opened.");
    }
    end(found->second);
    state.ranges.erase(found);
  });
}

extern "C" __attribute__((visibility("default"))) aclprofStepInfo* aclprofCreateStepInfo() {
  return new aclprofStepInfo;
}
extern "C" __attribute__((visibility("default"))) void aclprofDestroyStepInfo(
    aclprofStepInfo* step) {
  delete step;
}
// A span of the host's, from the call that starts the step to that which ends it.
VNPU_ACL(aclprofGetStepTimestamp,
         (aclprofStepInfo * step, aclprofStepTag tag, aclrtStream stream)) {
  return guarded("aclprofGetStepTimestamp", [&] {
    vnpu::abi::stream_of(stream);
    if (step == nullptr || (tag != ACL_STEP_START && tag != ACL_STEP_END)) {
      refuse("a step starts (0) or ends (1), here " + std::to_string(tag) + ".");
    }
    if ((tag == ACL_STEP_START) != (step->begin < 0)) {
      refuse("a step starts once, and then ends once.");
    }
    if (tag == ACL_STEP_START) {
      Marks& state = marks();
      const std::lock_guard lock(state.mutex);
      *step = {DeviceProfile::now(), ++state.steps};
    } else {
      end({"step " + std::to_string(step->number), step->begin, ::gettid()});
      step->begin = -1;
    }
  });
}
