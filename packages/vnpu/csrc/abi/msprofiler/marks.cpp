// Steps that a program marks in a running profile. Source: hicann/runtime docs/zh/api_ref/19-02.

#include <unistd.h>

#include <atomic>
#include <string>

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

[[noreturn]] void refuse(const std::string& message) {
  throw Failure(FailureKind::kInvalidArgument, "vnpu: " + message);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) aclprofStepInfo* aclprofCreateStepInfo() {
  return new aclprofStepInfo;
}
extern "C" __attribute__((visibility("default"))) void aclprofDestroyStepInfo(
    aclprofStepInfo* step) {
  delete step;
}
// The host's time from the call that starts a step to the call that ends it.
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
      static std::atomic<uint64_t> steps = 0;
      *step = {DeviceProfile::now(), ++steps};
    } else {
      DeviceProfile::add(
          {"step " + std::to_string(step->number), ::gettid(), step->begin, DeviceProfile::now()});
      step->begin = -1;
    }
  });
}
