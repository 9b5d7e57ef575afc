#include "device/fork.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include "device/system.h"

namespace vnpu {
namespace {

// A forked process lacks the threads of OpenMP's parallel regions, and would wait for them forever
// in its first region. This ends them before the fork; the next region starts them again. Found by
// name: the device itself is built without OpenMP and loads no library.
void end_parallel_threads() {
  using Pause = int (*)(int);
  constexpr int kSoft = 1;  // omp_pause_soft: OpenMP's settings stay
  const auto pause = reinterpret_cast<Pause>(::dlsym(RTLD_DEFAULT, "omp_pause_resource_all"));
  if (pause != nullptr) pause(kSoft);  // fails inside a region: do not fork there
}

void mark_copy() {
  if (System::is_open()) is_forked_copy = true;
}

[[maybe_unused]] const int registered = ::pthread_atfork(end_parallel_threads, nullptr, mark_copy);

}  // namespace

bool is_forked_copy = false;

std::string forked_copy_text(const char* function) {
  return "vnpu: process " + std::to_string(::getpid()) +
         " was forked from one that had opened its devices, which a fork cannot use. Fork before "
         "the first use of a device, or start the process anew (spawn). [" +
         function + "]";
}

}  // namespace vnpu
