#pragma once

// Calls of the C library that fail, and clocks that jump, as a plan (device/fault_plan.h) says.
// This library comes before the C library in a process (LD_PRELOAD, which `vnpu run` sets where a
// plan asks for it), and needs no other one.

#include <cstddef>
#include <cstdint>

namespace vnpu::host_faults {

enum class Call : uint8_t { kMalloc, kOpen, kWrite, kFsync, kMonotonic, kRealtime };
constexpr size_t kCalls = 6;

// Applies the plan to this call. Returns the errno with which the call must fail, or 0 to continue.
// Does not change errno.
int reach(Call call);

// Offset to add to the host's clock. call: kMonotonic or kRealtime
int64_t jumped_ns(Call call);

// In the file of a process, DIRECTORY/PID.host, in this order; calls by Call.
struct HostCounts {
  int64_t rank;
  uint64_t calls[kCalls];
};

}  // namespace vnpu::host_faults
