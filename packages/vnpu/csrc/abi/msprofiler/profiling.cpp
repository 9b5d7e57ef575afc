// Functions that torch_npu.profiler calls to profile a device (acl_prof.h): each profile is a
// directory of tasks (trace/device_profile.h), which `msprof` of vnpu's toolkit exports.

#include "acl/acl_prof.h"

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "trace/device_profile.h"

using vnpu::Failure;
using vnpu::FailureKind;

struct aclprofConfig {
  std::vector<uint32_t> devices;
};

namespace {

struct Profiling {
  std::mutex mutex;
  std::string directory;  // for results; "" outside of aclprofInit and aclprofFinalize
  std::set<const aclprofConfig*> configs;
  const aclprofConfig* running = nullptr;
  std::unique_ptr<vnpu::trace::DeviceProfile> profile;  // while running
};

Profiling& profiling() {
  static auto* state = new Profiling;  // outlives the threads that end with the process
  return *state;
}

void require(bool condition, const std::string& message) {
  if (!condition) {
    throw Failure(FailureKind::kInvalidArgument, message);
  }
}

}  // namespace

VNPU_ACL(aclprofInit, (const char* path, size_t length)) {
  return vnpu::abi::guarded("aclprofInit", [&] {
    require(path != nullptr && length > 0, "vnpu: aclprofInit takes a directory for its results.");
    Profiling& state = profiling();
    std::lock_guard lock(state.mutex);
    require(state.directory.empty(),
            "vnpu: aclprofInit is called a second time; call aclprofFinalize first.");
    state.directory.assign(path, length);
  });
}

VNPU_ACL(aclprofFinalize, ()) {
  return vnpu::abi::guarded("aclprofFinalize", [&] {
    Profiling& state = profiling();
    std::lock_guard lock(state.mutex);
    require(!state.directory.empty(), "vnpu: aclprofFinalize without aclprofInit before it.");
    require(state.running == nullptr,
            "vnpu: aclprofFinalize while profiling runs; call aclprofStop first.");
    state.directory.clear();
  });
}

extern "C" __attribute__((visibility("default"))) aclprofConfig* aclprofCreateConfig(
    uint32_t* devices, uint32_t count, aclprofAicoreMetrics, const aclprofAicoreEvents*, uint64_t) {
  aclprofConfig* config = nullptr;
  vnpu::abi::guarded("aclprofCreateConfig", [&] {
    require(devices != nullptr && count > 0,
            "vnpu: aclprofCreateConfig takes the numbers of one device or more.");
    Profiling& state = profiling();
    std::lock_guard lock(state.mutex);
    config = new aclprofConfig{{devices, devices + count}};
    state.configs.insert(config);
  });
  return config;
}

VNPU_ACL(aclprofDestroyConfig, (const aclprofConfig* config)) {
  return vnpu::abi::guarded("aclprofDestroyConfig", [&] {
    Profiling& state = profiling();
    std::lock_guard lock(state.mutex);
    require(config != state.running,
            "vnpu: aclprofDestroyConfig of what profiling runs with; call aclprofStop first.");
    require(state.configs.erase(config) == 1,
            "vnpu: aclprofDestroyConfig of what aclprofCreateConfig did not make.");
    delete config;
  });
}

VNPU_ACL(aclprofStart, (const aclprofConfig* config)) {
  return vnpu::abi::guarded("aclprofStart", [&] {
    Profiling& state = profiling();
    std::lock_guard lock(state.mutex);
    require(!state.directory.empty(), "vnpu: aclprofStart without aclprofInit before it.");
    require(state.configs.count(config) == 1,
            "vnpu: aclprofStart with what aclprofCreateConfig did not make.");
    require(state.running == nullptr,
            "vnpu: aclprofStart while profiling runs; call aclprofStop first.");
    state.profile = std::make_unique<vnpu::trace::DeviceProfile>(state.directory, config->devices);
    state.running = config;
  });
}

VNPU_ACL(aclprofStop, (const aclprofConfig* config)) {
  return vnpu::abi::guarded("aclprofStop", [&] {
    Profiling& state = profiling();
    std::lock_guard lock(state.mutex);
    require(config != nullptr && state.running == config,
            "vnpu: aclprofStop with another configuration than profiling runs with.");
    state.profile.reset();
    state.running = nullptr;
  });
}

// Only the path of profiles has an effect. The other settings concern samples and counters of a
// chip's driver, which a virtual NPU lacks.
VNPU_ACL(aclprofSetConfig, (aclprofConfigType type, const char* value, size_t length)) {
  return vnpu::abi::guarded("aclprofSetConfig", [&] {
    constexpr size_t kMostBytes = 256;
    require(type >= ACL_PROF_ARGS_MIN + 1 && type < ACL_PROF_ARGS_MAX,
            "vnpu: aclprofSetConfig has no setting " + std::to_string(type) + ".");
    require(value != nullptr && length > 0 && length <= kMostBytes,
            "vnpu: aclprofSetConfig takes a value of 1 to " + std::to_string(kMostBytes) +
                " bytes, not of " + std::to_string(length) + ".");
    Profiling& state = profiling();
    std::lock_guard lock(state.mutex);
    require(state.running == nullptr,
            "vnpu: aclprofSetConfig while profiling runs; call it before aclprofStart.");
    if (type == ACL_PROF_PATH) state.directory.assign(value, length);
  });
}
