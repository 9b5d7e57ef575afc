#include "device/host_counts.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <new>
#include <string>

#include "device/shared_file.h"

namespace vnpu {
namespace {

constexpr char kVariable[] = "VNPU_COUNTS";

// As `ps` shows it; empty where /proc is not readable.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (char& c : text) {
    if (c == '\0') c = ' ';
  }
  return text;
}

// Counts in a mapped file, until the process ends; the process's command follows them.
HostCounts* mapped_counts(const std::string& directory) {
  const std::string name = command_line();
  auto* const mapped = static_cast<char*>(
      shared_file::mapped_in(kVariable, directory, std::to_string(::getpid()) + ".counts",
                             sizeof(HostCounts) + name.size(), /*anew=*/true));
  name.copy(mapped + sizeof(HostCounts), name.size());
  return new (mapped) HostCounts;
}

}  // namespace

HostCounts& HostCounts::instance() {
  static HostCounts& counts = *[] {
    const char* const directory = std::getenv(kVariable);
    const bool is_kept = directory != nullptr && *directory != '\0';
    return is_kept ? mapped_counts(directory) : new HostCounts;
  }();
  return counts;
}

}  // namespace vnpu
