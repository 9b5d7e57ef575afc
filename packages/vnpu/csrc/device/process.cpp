#include "device/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "device/failure.h"

namespace vnpu {
namespace {

struct Status {
  char state;
  uint64_t start_time;
};

// True if a process with this id exists; for use when nothing about it can be read, such as without
// a free descriptor. It may be a later process with the same id.
bool has_process(pid_t pid) { return ::kill(pid, 0) == 0 || errno != ESRCH; }

// From /proc/PID/stat: "pid (command) state ppid ..."; the start time is field 22. The command may
// hold any characters, so fields are counted from the last parenthesis. errno says why there is
// none.
std::optional<Status> status_of_process(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  char text[1024];
  const ssize_t length = ::read(file, text, sizeof(text) - 1);
  const int error = errno;
  ::close(file);
  errno = error;
  if (length <= 0) return std::nullopt;
  text[length] = '\0';
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] != ' ') return std::nullopt;
  at += 2;
  Status status{*at, 0};
  for (int field = 3; field < 22; ++field) {
    at = std::strchr(at, ' ');
    if (at == nullptr) return std::nullopt;
    ++at;
  }
  status.start_time = std::strtoull(at, nullptr, 10);
  return status;
}

}  // namespace

ProcessIdentity ProcessIdentity::self() {
  const pid_t pid = ::getpid();
  const std::optional<Status> status = status_of_process(pid);
  if (!status.has_value()) {
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: /proc/self/stat, which tells this process from others, cannot "
                              "be read: ") +
                      std::strerror(errno) + ". A limit of open files is raised by ulimit -n.");
  }
  return ProcessIdentity{pid, status->start_time};
}

bool ProcessIdentity::alive() const {
  const std::optional<Status> status = status_of_process(pid);
  if (!status.has_value()) return has_process(pid);
  return status->start_time == start_time && status->state != 'Z' && status->state != 'X';
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

uint64_t pid_namespace() {
  struct stat info = {};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

}  // namespace vnpu
