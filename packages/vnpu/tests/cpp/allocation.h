#pragma once

namespace vnpu::tests {

// What operator new of the whole program, libvnpu included, does first; null: nothing. It may not
// allocate. Volatile: set before an access that ends the program, and not after it.
extern void (*volatile before_allocation)();

}  // namespace vnpu::tests
