#include "abi/ascendcl/freed_memory.h"

#include <string>

#include "device/freed_memory.h"
#include "device/observer.h"
#include "device/system.h"

namespace vnpu::abi {

void tell_of_free(const void* address, const char* function) {
  const Observers& observers = Observers::instance();
  if (!observers.any()) return;
  const size_t bytes = Memory::instance().bytes_at(address);
  if (bytes == 0) return;
  const std::string site = observers.call_site();
  System::instance().executor().tell(&Observer::on_device_free, address, bytes, function, site);
}

void run_what_is_queued(const char* function) {
  if (System::current_device() < 0) return;
  Executor& executor = System::instance().executor();
  if (executor.drain_device(System::current_device(), std::nullopt)) return;
  throw Failure(FailureKind::kWaitTimeout,
                std::string("vnpu: ") + function + " of memory that tasks may still use: " +
                    executor.pending() + ". Synchronize the device before the memory goes.");
}

void free_when_unused(void* address) {
  FreedMemory::instance().free(System::instance().executor(), System::current_device(), address);
}

}  // namespace vnpu::abi
