#include "device/host_counts.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>

#include "device/failure.h"

namespace vnpu {
namespace {

constexpr mode_t kMode = 0644;

[[noreturn]] void refuse_directory(const std::string& directory) {
  throw Failure(FailureKind::kInvalidArgument, "vnpu: VNPU_COUNTS='" + directory +
                                                   "' is not valid: " + std::strerror(errno) +
                                                   ". Expected a directory that can be written.");
}

// As `ps` shows it; empty where /proc is not readable.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (char& c : text) {
    if (c == '\0') c = ' ';
  }
  return text;
}

// A file's, until the process ends.
HostCounts* mapped_counts(const std::string& directory) {
  const std::string path = directory + "/" + std::to_string(::getpid()) + ".counts";
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, kMode);
  if (file < 0 || ::ftruncate(file, sizeof(HostCounts)) != 0) refuse_directory(directory);
  void* const mapped =
      ::mmap(nullptr, sizeof(HostCounts), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) refuse_directory(directory);
  const std::string name = command_line();
  const ssize_t written = ::pwrite(file, name.data(), name.size(), sizeof(HostCounts));
  if (written != static_cast<ssize_t>(name.size())) refuse_directory(directory);
  ::close(file);
  return new (mapped) HostCounts;
}

}  // namespace

HostCounts& HostCounts::instance() {
  static HostCounts& counts = *[] {
    const char* const directory = std::getenv("VNPU_COUNTS");
    const bool is_kept = directory != nullptr && *directory != '\0';
    return is_kept ? mapped_counts(directory) : new HostCounts;
  }();
  return counts;
}

}  // namespace vnpu
