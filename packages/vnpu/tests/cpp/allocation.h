#pragma once

namespace vnpu::tests {

// Hook that operator new of the whole program, libvnpu included, calls first; null: none. It may
// not allocate. Volatile: set before an access that ends the program, and not after it.
extern void (*volatile before_allocation)();

}  // namespace vnpu::tests
