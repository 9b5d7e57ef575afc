#include "allocation.h"

#include <cstdlib>
#include <new>

namespace vnpu::tests {

void (*volatile before_allocation)() = nullptr;

}  // namespace vnpu::tests

void* operator new(size_t bytes) {
  if (auto* const first = vnpu::tests::before_allocation) first();
  void* const memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
