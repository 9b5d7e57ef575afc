#include "allocation.h"

#include <unistd.h>

#include <cstdlib>
#include <new>

namespace vnpu::tests {

bool no_allocation = false;

}  // namespace vnpu::tests

// Of the whole program, libvnpu included.
void* operator new(size_t bytes) {
  if (vnpu::tests::no_allocation) {
    constexpr char kText[] = "operator new where nothing may be allocated";
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
    ::_exit(3);
  }
  void* const memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
