#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/failure.h"
#include "device/task.h"

namespace vnpu {

// The newest error of each device since it was repaired: the failure of a running task. Refused
// calls do not count.
class DeviceErrors {
 public:
  static DeviceErrors& instance();

  struct Error {
    FailureKind kind;
    std::string task;
  };
  std::optional<Error> newest(int device) const;

  // Records the error of a failed task, in a catch clause. A memory error counts for the first page
  // that the task writes.
  void note_current(int device, const Task& task);

  // Device memory with errors that were not corrected, in the order in which they came.
  std::vector<MemoryRange> bad_memory(int device) const;
  // Removes errors that begin in these ranges; after the last one the device has no error.
  void repair(int device, const std::vector<MemoryRange>& ranges);

 private:
  struct Device {
    std::optional<Error> newest;
    std::vector<MemoryRange> bad;
  };
  mutable std::mutex mutex_;
  std::map<int, Device> devices_;
};

}  // namespace vnpu
