#pragma once

namespace vnpu::abi {

// Before memory goes: tells observers. Neither aclrtFree nor aclrtUnmapMem waits for work that
// still uses the memory: it is the program that has to, and the race detector says where it does
// not. What is queued runs all the same, so that what a program computes does not depend on it.
// Source: CANN's runtime, 11-01_device_memory_malloc_and_free.md, aclrtFree.
void tell_of_free(const void* address, const char* function);
// Runs what the current device has in its queues. Throws kWaitTimeout where that waits for
// something that does not come.
void run_what_is_queued(const char* function);
// Frees an allocation once nothing that was launched before can use it.
void free_when_unused(void* address);

}  // namespace vnpu::abi
