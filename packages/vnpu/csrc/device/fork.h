#pragma once

#include <string>

namespace vnpu {

// True in a process that was forked after the devices had been opened. It lacks its streams'
// threads and the holders of locks, so a call into a device might never end. Set while no other
// thread exists.
extern bool is_forked_copy;

// The error text for such a process. Takes no lock.
std::string forked_copy_text(const char* function);

}  // namespace vnpu
