#include "device/system.h"

#include <atomic>
#include <cstdlib>
#include <set>
#include <sstream>

#include "device/configuration.h"
#include "device/failure.h"
#include "device/faults.h"

namespace vnpu {
namespace {

std::atomic<bool> exists = false;

std::vector<int> visible_devices(const Configuration& configuration) {
  const int count = static_cast<int>(configuration.device_count);
  std::vector<int> devices;
  const char* text = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int i = 0; i < count; ++i) devices.push_back(i);
    return devices;
  }
  // As the runtime does: the list ends at the first entry that names no device.
  std::stringstream entries(text);
  std::string entry;
  std::set<int> seen;
  while (std::getline(entries, entry, ',')) {
    char* end = nullptr;
    const long device = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || *end != '\0' || device < 0 || device >= count) break;
    if (!seen.insert(static_cast<int>(device)).second) break;
    devices.push_back(static_cast<int>(device));
  }
  return devices;
}

}  // namespace

System& System::instance() {
  // Never destroyed: torch_npu calls in after static destructors have run.
  static System* const system = new System();
  return *system;
}

uint32_t System::device_count() {
  if (exists) return static_cast<uint32_t>(instance().visible_.size());
  return static_cast<uint32_t>(visible_devices(Configuration::of_environment()).size());
}

bool System::is_open() { return exists; }

System::System() : visible_(visible_devices(Configuration::instance())) {
  faults::open_plan();  // a wrong plan stops the program before anything else
  // Never destroyed either: its threads run until the process ends.
  executor_ = new Executor(Configuration::instance(), Observers::instance());
  default_streams_.resize(visible_.size());
  exists = true;
}

int System::physical(int device) const {
  if (device < 0 || static_cast<size_t>(device) >= visible_.size()) {
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    throw Failure(
        FailureKind::kNoSuchDevice,
        "vnpu: there is no device " + std::to_string(device) + "; " +
            std::to_string(visible_.size()) + " are visible" +
            (visible != nullptr ? std::string(" (ASCEND_RT_VISIBLE_DEVICES=") + visible + ")"
                                : "") +
            ". VNPU_DEVICES sets how many virtual devices there are.");
  }
  return visible_[static_cast<size_t>(device)];
}

int& System::current_device() {
  thread_local int device = -1;
  return device;
}

void System::set_default_device(int device) {
  physical(device);
  default_device_.store(device, std::memory_order_relaxed);
}

int System::require_current_device() const {
  int& device = current_device();
  if (device < 0) device = default_device_.load(std::memory_order_relaxed);
  if (device < 0) {
    throw Failure(FailureKind::kDeviceNotSet,
                  "vnpu: this thread has set no device; call aclrtSetDevice first.");
  }
  return device;
}

const StreamPtr& System::default_stream(int device) {
  physical(device);
  std::lock_guard lock(mutex_);
  StreamPtr& stream = default_streams_[static_cast<size_t>(device)];
  if (stream == nullptr) stream = executor_->create_stream(device, 0);
  return stream;
}

}  // namespace vnpu
