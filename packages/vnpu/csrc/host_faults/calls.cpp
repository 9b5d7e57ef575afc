// Replaces the C library's functions that take memory, descriptors and disk space.

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "host_faults/planned_calls.h"

using vnpu::host_faults::Call;
using vnpu::host_faults::reach;

#define REPLACES extern "C" __attribute__((visibility("default")))
// The function that is replaced. The first call looks it up.
#define REPLACED(name) \
  static const auto replaced = reinterpret_cast<decltype(&::name)>(::dlsym(RTLD_NEXT, #name))

// The GNU C library's names for libraries that replace malloc. dlsym itself needs memory.
extern "C" void* __libc_malloc(size_t size);
extern "C" void* __libc_calloc(size_t count, size_t size);
extern "C" void* __libc_realloc(void* address, size_t size);
extern "C" void* __libc_memalign(size_t alignment, size_t size);

namespace {

// True with errno set where the call has to fail.
bool fails(Call call) {
  const int code = reach(call);
  if (code == 0) return false;
  errno = code;
  return true;
}

// Pipes, sockets and terminals cannot run out of space. The standard outputs are excluded too, as
// they report the faults.
bool is_on_disk(int file) {
  struct stat status{};
  return file > STDERR_FILENO && ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
}

bool write_fails(int file) { return is_on_disk(file) && fails(Call::kWrite); }

}  // namespace

REPLACES void* malloc(size_t size) noexcept {
  return fails(Call::kMalloc) ? nullptr : __libc_malloc(size);
}

REPLACES void* calloc(size_t count, size_t size) noexcept {
  return fails(Call::kMalloc) ? nullptr : __libc_calloc(count, size);
}

REPLACES void* realloc(void* address, size_t size) noexcept {
  return fails(Call::kMalloc) ? nullptr : __libc_realloc(address, size);
}

REPLACES void* aligned_alloc(size_t alignment, size_t size) noexcept {
  return fails(Call::kMalloc) ? nullptr : __libc_memalign(alignment, size);
}

REPLACES int posix_memalign(void** result, size_t alignment, size_t size) noexcept {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) {
    return EINVAL;
  }
  if (const int code = reach(Call::kMalloc); code != 0) return code;
  const int before = errno;
  void* const address = __libc_memalign(alignment, size);
  errno = before;
  if (address == nullptr) return ENOMEM;
  *result = address;
  return 0;
}

// open() has a third argument, the mode, only with flags that create a file.
#define MODE_BEHIND(flags)                                              \
  mode_t mode = 0;                                                      \
  if (((flags) & O_CREAT) != 0 || ((flags) & O_TMPFILE) == O_TMPFILE) { \
    va_list arguments;                                                  \
    va_start(arguments, flags);                                         \
    mode = va_arg(arguments, mode_t);                                   \
    va_end(arguments);                                                  \
  }

REPLACES int open(const char* path, int flags, ...) {
  MODE_BEHIND(flags)
  REPLACED(open);
  return fails(Call::kOpen) ? -1 : replaced(path, flags, mode);
}

REPLACES int open64(const char* path, int flags, ...) {
  MODE_BEHIND(flags)
  REPLACED(open64);
  return fails(Call::kOpen) ? -1 : replaced(path, flags, mode);
}

REPLACES int openat(int directory, const char* path, int flags, ...) {
  MODE_BEHIND(flags)
  REPLACED(openat);
  return fails(Call::kOpen) ? -1 : replaced(directory, path, flags, mode);
}

REPLACES int openat64(int directory, const char* path, int flags, ...) {
  MODE_BEHIND(flags)
  REPLACED(openat64);
  return fails(Call::kOpen) ? -1 : replaced(directory, path, flags, mode);
}

REPLACES FILE* fopen(const char* path, const char* mode) {
  REPLACED(fopen);
  return fails(Call::kOpen) ? nullptr : replaced(path, mode);
}

REPLACES FILE* fopen64(const char* path, const char* mode) {
  REPLACED(fopen64);
  return fails(Call::kOpen) ? nullptr : replaced(path, mode);
}

REPLACES int memfd_create(const char* name, unsigned int flags) noexcept {
  REPLACED(memfd_create);
  return fails(Call::kOpen) ? -1 : replaced(name, flags);
}

REPLACES int socket(int domain, int type, int protocol) noexcept {
  REPLACED(socket);
  return fails(Call::kOpen) ? -1 : replaced(domain, type, protocol);
}

REPLACES ssize_t write(int file, const void* data, size_t size) {
  REPLACED(write);
  return write_fails(file) ? -1 : replaced(file, data, size);
}

REPLACES ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  REPLACED(pwrite);
  return write_fails(file) ? -1 : replaced(file, data, size, offset);
}

REPLACES ssize_t pwrite64(int file, const void* data, size_t size, off64_t offset) {
  REPLACED(pwrite64);
  return write_fails(file) ? -1 : replaced(file, data, size, offset);
}

REPLACES ssize_t writev(int file, const iovec* parts, int count) {
  REPLACED(writev);
  return write_fails(file) ? -1 : replaced(file, parts, count);
}

REPLACES int fsync(int file) {
  REPLACED(fsync);
  return fails(Call::kFsync) ? -1 : replaced(file);
}

REPLACES int fdatasync(int file) {
  REPLACED(fdatasync);
  return fails(Call::kFsync) ? -1 : replaced(file);
}
