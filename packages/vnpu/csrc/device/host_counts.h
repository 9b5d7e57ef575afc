#pragma once

#include <atomic>
#include <cstdint>

namespace vnpu {

// What a host asks of its devices, and what keeps it from running ahead of them, counted since the
// process began.
struct HostCounts {
  std::atomic<uint64_t> launches{0};          // one for a replay; no records and waits of events
  std::atomic<uint64_t> synchronizations{0};  // of streams, events and devices, also idle ones
  std::atomic<uint64_t> copies_to_host{0};    // from a device, asynchronous ones too

  static HostCounts& instance();
};

}  // namespace vnpu
