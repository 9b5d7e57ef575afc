#pragma once

namespace vnpu::tests {

// While it is true, operator new ends this process at once.
extern bool no_allocation;

}  // namespace vnpu::tests
