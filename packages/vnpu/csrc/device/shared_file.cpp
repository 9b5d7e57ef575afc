#include "device/shared_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "device/failure.h"

namespace vnpu::shared_file {
namespace {

constexpr int kSerialBits = 42;
constexpr uint64_t kSerialMask = (uint64_t{1} << kSerialBits) - 1;
constexpr size_t kDigits = 16;

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (number >= 0) ::close(number);
}

int FileDescriptor::release() { return std::exchange(number, -1); }

uint64_t new_identity() {
  // Begins anywhere, as pids come again too.
  static std::atomic<uint64_t> next{[] {
    uint64_t first = 0;
    if (::getrandom(&first, sizeof(first), 0) != sizeof(first)) first = 1;
    return first;
  }()};
  return (static_cast<uint64_t>(::getpid()) << kSerialBits) | (++next & kSerialMask);
}

void refuse_directory(const char* variable, const std::string& directory) {
  throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: ") + variable + "='" + directory +
                                                   "' is not valid: " + std::strerror(errno) +
                                                   ". Expected a directory that can be written.");
}

void* mapped_in(const char* variable, const std::string& directory, const std::string& name,
                size_t bytes, bool anew) {
  const FileDescriptor file(::open((directory + "/" + name).c_str(),
                                   O_RDWR | O_CREAT | O_CLOEXEC | (anew ? O_TRUNC : 0), 0644));
  if (file.number < 0 || ::ftruncate(file.number, static_cast<off_t>(bytes)) != 0) {
    refuse_directory(variable, directory);
  }
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.number, 0);
  if (mapped == MAP_FAILED) refuse_directory(variable, directory);
  return mapped;
}

FileDescriptor make(uint64_t identity, size_t bytes) {
  const std::string name = key_of("vnpu-memory", identity);
  FileDescriptor file(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.number < 0 || ::ftruncate(file.number, static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(file.number, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw Failure(
        FailureKind::kOutOfMemory,
        std::string("vnpu: no backing file for device memory: ") + std::strerror(errno) +
            ". Each piece of physical or shared memory takes one descriptor (ulimit -n).");
  }
  return file;
}

// The file is searched among the files of the process that made it, and inspected before it is
// opened: its number may by now belong to another file, which must not be touched.
FileDescriptor open(uint64_t identity, const std::string& what) {
  const auto pid = static_cast<long>(identity >> kSerialBits);
  const std::string directory = "/proc/" + std::to_string(pid) + "/fd";
  const std::string wanted = "/memfd:" + key_of("vnpu-memory", identity) + " (deleted)";
  const auto refuse = [&](const std::string& why) -> FileDescriptor {
    throw Failure(
        FailureKind::kInvalidHandle,
        "vnpu: " + what + " of process " + std::to_string(pid) + " cannot be imported: " + why);
  };
  const std::unique_ptr<DIR, int (*)(DIR*)> files(::opendir(directory.c_str()), ::closedir);
  if (files == nullptr) {
    const int error = errno;
    return refuse(directory + ": " + std::strerror(error) +
                  (error == ENOENT ? ". The process has ended." : "."));
  }
  while (const dirent* const entry = ::readdir(files.get())) {
    const std::string path = directory + "/" + entry->d_name;
    char target[128];
    const ssize_t length = ::readlink(path.c_str(), target, sizeof(target));
    if (length < 0 || std::string(target, static_cast<size_t>(length)) != wanted) continue;
    const FileDescriptor seen(::open(path.c_str(), O_PATH | O_CLOEXEC));
    if (seen.number < 0) return refuse(path + ": " + std::strerror(errno));
    const std::string own = "/proc/self/fd/" + std::to_string(seen.number);
    const ssize_t same = ::readlink(own.c_str(), target, sizeof(target));
    if (same < 0 || std::string(target, static_cast<size_t>(same)) != wanted) break;
    FileDescriptor file(::open(own.c_str(), O_RDWR | O_CLOEXEC));
    if (file.number < 0) return refuse(path + ": " + std::strerror(errno));
    return file;
  }
  return refuse("it was freed there. Keep the exporter's handle until all have imported it.");
}

std::string key_of(const char* prefix, uint64_t identity) {
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(identity));
  return std::string(prefix) + "-" + digits;
}

uint64_t identity_of(const char* prefix, const std::string& key) {
  const std::string begin = std::string(prefix) + "-";
  const std::string digits = key.size() > begin.size() ? key.substr(begin.size()) : "";
  if (!key.starts_with(begin) || digits.size() != kDigits ||
      digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: '" + key.substr(0, 64) + "' is no key that vnpu has given (" + begin +
                      "and 16 digits): pass it on unchanged, with its end.");
  }
  return std::stoull(digits, nullptr, 16);
}

}  // namespace vnpu::shared_file
