#pragma once

#include <string>

namespace vnpu {

// The innermost frames of the calling thread's Python stack, one "file:line function" each, without
// those of torch itself. Empty when the process runs no Python. Costs microseconds
// and takes Python's lock: call it without any other.
std::string python_call_site();

// False on a library's own thread: a thread unknown to Python in a process that runs Python.
bool is_program_thread();

}  // namespace vnpu
