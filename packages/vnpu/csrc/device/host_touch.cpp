#include "device/host_touch.h"

#include <signal.h>
#include <unistd.h>

#include <cstring>

#include "device/memory.h"

namespace vnpu {
namespace {

struct sigaction previous_segv;

// Text for a signal handler, which may neither allocate nor wait: the thread that touched the
// memory may be inside malloc.
class SignalText {
 public:
  SignalText& operator<<(const char* text) {
    while (*text != '\0' && used_ < sizeof(text_)) text_[used_++] = *text++;
    return *this;
  }
  SignalText& operator<<(uint64_t number) { return append(number, 10); }
  SignalText& hex(uint64_t number) { return (*this << "0x").append(number, 16); }
  void write() const {
    // The only output that is allowed here; a short write changes nothing.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text_, used_);
  }

 private:
  SignalText& append(uint64_t number, uint64_t base) {
    char digits[24];
    size_t at = sizeof(digits);
    digits[--at] = '\0';
    do {
      digits[--at] = "0123456789abcdef"[number % base];
      number /= base;
    } while (number > 0);
    return *this << digits + at;
  }
  char text_[512];
  size_t used_ = 0;
};

void on_segv(int signal, siginfo_t* info, void* context) {
  const Memory& memory = Memory::instance();
  if (memory.is_device_address(info->si_addr)) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    SignalText text;
    (text << "vnpu: host code touched device memory at ").hex(address);
    const Memory::Found found = memory.look_up(info->si_addr);
    if (*found.state != '\0') {
      const Memory::Allocation& a = found.allocation;
      text << " (byte " << address - a.begin << " of allocation #" << a.number << " on device "
           << static_cast<uint64_t>(a.device) << ", " << a.bytes << " bytes, " << found.state
           << ")";
    }
    text << ".\nDevice memory can be read and written by device work only: copy it to the host "
            "first (tensor.cpu(), aclrtMemcpy).\n";
    text.write();
  }
  if ((previous_segv.sa_flags & SA_SIGINFO) != 0 && previous_segv.sa_sigaction != nullptr) {
    previous_segv.sa_sigaction(signal, info, context);
    return;
  }
  ::sigaction(SIGSEGV, &previous_segv, nullptr);  // returns to the access, which faults again
}

}  // namespace

void report_host_touches() {
  struct sigaction action = {};
  action.sa_sigaction = on_segv;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGSEGV, &action, &previous_segv);
}

}  // namespace vnpu
