#pragma once

#include <atomic>
#include <cstdint>

namespace vnpu {

// What keeps a host from running ahead of its devices, counted since the process began.
struct HostCounts {
  std::atomic<uint64_t> synchronizations{0};  // of streams, events and devices, also idle ones
  std::atomic<uint64_t> copies_to_host{0};    // from a device, asynchronous ones too

  static HostCounts& instance();
};

}  // namespace vnpu
