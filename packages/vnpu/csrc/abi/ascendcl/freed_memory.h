#pragma once

namespace vnpu::abi {

// Tells observers before memory is freed. aclrtFree and aclrtUnmapMem do not wait for work that
// still uses the memory: the program must, and the race detector reports if it does not. Queued
// work still runs, so that a program's results do not depend on it. Source: CANN's runtime,
// 11-01_device_memory_malloc_and_free.md, aclrtFree.
void tell_of_free(const void* address, const char* function);
// Runs all queued tasks of the current device. Throws kWaitTimeout if one waits for something that
// never happens.
void run_what_is_queued(const char* function);
// Frees an allocation once nothing that was launched before can use it.
void free_when_unused(void* address);

}  // namespace vnpu::abi
