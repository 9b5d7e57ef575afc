#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/executor.h"
#include "device/memory.h"

namespace vnpu {

// The virtual devices of this process. Program-visible device numbers are positions in
// ASCEND_RT_VISIBLE_DEVICES when it is set, else the devices' own numbers.
class System {
 public:
  static System& instance();

  // Number of devices that a program sees. Counting fixes no settings: a process that only counted,
  // as libraries do while they are imported, can fork children with other settings.
  static uint32_t device_count();
  // True if this process has opened the devices: its settings are fixed, and a fork of it could not
  // use the devices.
  static bool is_open();
  // The device's own number; throws kNoSuchDevice with the valid range.
  int physical(int visible_device) const;

  // The calling thread's device (visible number), -1 if none was set.
  static int& current_device();
  // Sets the device of threads that need one and have set none. Without it, that is an error.
  void set_default_device(int visible_device);
  int require_current_device() const;

  Executor& executor() { return *executor_; }
  // The stream that a null handle stands for.
  const StreamPtr& default_stream(int visible_device);

 private:
  System();
  std::vector<int> visible_;
  std::atomic<int> default_device_{-1};
  Executor* executor_;
  std::vector<StreamPtr> default_streams_;
  std::mutex mutex_;
};

}  // namespace vnpu
