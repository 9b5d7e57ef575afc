#pragma once

#include <cstddef>
#include <cstdint>

namespace vnpu {

// The allocation around an address that host code has touched.
struct HostTouch {
  bool is_device_memory = false;
  // The allocation that holds it; an empty state: none, or none that can be named now.
  const char* state = "";
  uintptr_t begin = 0;
  size_t bytes = 0;
  uint64_t number = 0;
  int device = 0;
};

// From now on a process that dereferences a device address prints a message before it ends by
// SIGSEGV; every other fault goes to the handler that was there before. `look_up` is called in the
// signal handler: it may neither allocate nor wait.
void report_host_touches(HostTouch (*look_up)(const void* address));

}  // namespace vnpu
