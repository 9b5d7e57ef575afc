#pragma once

#include <string>

namespace vnpu {

// True in a process that was forked after the devices had been opened. Its streams' threads, and
// whoever held a lock at that moment, stayed behind: whatever it asks of a device might never end.
// Set while no other thread exists.
extern bool is_forked_copy;

// What to tell such a process. Takes no lock.
std::string forked_copy_text(const char* function);

}  // namespace vnpu
