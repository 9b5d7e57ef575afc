#include "device/host_touch.h"

#include <signal.h>
#include <unistd.h>

#include <cstdint>

namespace vnpu {
namespace {

struct sigaction previous_segv;
HostTouch (*look_up_address)(const void*) = nullptr;

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
  const HostTouch touch = look_up_address(info->si_addr);
  if (touch.is_device_memory) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    SignalText text;
    (text << "vnpu: host code touched device memory at ").hex(address);
    if (*touch.state != '\0') {
      text << " (byte " << address - touch.begin << " of allocation #" << touch.number
           << " on device " << static_cast<uint64_t>(touch.device) << ", " << touch.bytes
           << " bytes, " << touch.state << ")";
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

void report_host_touches(HostTouch (*look_up)(const void* address)) {
  look_up_address = look_up;
  struct sigaction action = {};
  action.sa_sigaction = on_segv;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGSEGV, &action, &previous_segv);
}

}  // namespace vnpu
