#include "device/device_errors.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace vnpu {
namespace {

constexpr uintptr_t kPageBytes = 4096;
// rt_error_codes.h: an error of device memory, and one of several bits that HBM cannot correct.
constexpr auto kMemoryError = static_cast<FailureKind>(507053);
constexpr auto kMultiBitError = static_cast<FailureKind>(507054);

}  // namespace

DeviceErrors& DeviceErrors::instance() {
  static DeviceErrors* const errors = new DeviceErrors();  // tasks may outlive static objects
  return *errors;
}

std::optional<DeviceErrors::Error> DeviceErrors::newest(int device) const {
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(device);
  return found == devices_.end() ? std::nullopt : found->second.newest;
}

void DeviceErrors::note_current(int device, const Task& task) {
  FailureKind kind = FailureKind::kInternal;
  try {
    throw;
  } catch (const Failure& failure) {
    kind = failure.kind;
  } catch (const std::exception&) {
    kind = FailureKind::kInternal;
  }
  const std::lock_guard lock(mutex_);
  Device& own = devices_[device];
  own.newest = Error{kind, task.name};
  if (kind != kMemoryError && kind != kMultiBitError) return;
  bool is_first = true;
  task.touched.each_written([&](const MemoryRange& range) {
    if (!std::exchange(is_first, false)) return;
    own.bad.push_back({range.begin, std::min(range.end, range.begin + kPageBytes)});
  });
}

std::vector<MemoryRange> DeviceErrors::bad_memory(int device) const {
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(device);
  return found == devices_.end() ? std::vector<MemoryRange>{} : found->second.bad;
}

void DeviceErrors::repair(int device, const std::vector<MemoryRange>& ranges) {
  const std::lock_guard lock(mutex_);
  Device& own = devices_[device];
  std::erase_if(own.bad, [&](const MemoryRange& bad) {
    return std::ranges::any_of(ranges, [&](const MemoryRange& range) {
      return range.begin <= bad.begin && bad.begin < range.end;
    });
  });
  if (own.bad.empty()) own.newest.reset();
}

}  // namespace vnpu
