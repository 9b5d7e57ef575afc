#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

// Anonymous files that other processes of this host open by an id, and that the kernel frees with
// their last descriptor or mapping.
namespace vnpu::shared_file {

struct FileDescriptor {
  explicit FileDescriptor(int number) : number(number) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : number(other.release()) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  // Its number, which the caller closes from now on.
  int release();
  int number;
};

// Identifies a file across processes: the pid of the process that makes it, and a number that is
// used once. Descriptor numbers are reused, and would name another file.
uint64_t new_identity();

// Maps a file of a directory that an environment variable names, for this process and others, until
// the process ends. anew: discards the file's earlier content. Throws kInvalidArgument.
void* mapped_in(const char* variable, const std::string& directory, const std::string& name,
                size_t bytes, bool anew = false);
[[noreturn]] void refuse_directory(const char* variable, const std::string& directory);

// Makes a file of this size for good, all zero bytes. Throws kOutOfMemory.
FileDescriptor make(uint64_t identity, size_t bytes);

// Opens the file of another or of this process, to read and write; `what` names it in errors.
// Throws kInvalidHandle where there is none any more.
FileDescriptor open(uint64_t identity, const std::string& what);

// The key that programs hand to each other, "PREFIX-0123456789abcdef", and back. Throws
// kInvalidArgument for another text.
std::string key_of(const char* prefix, uint64_t identity);
uint64_t identity_of(const char* prefix, const std::string& key);

}  // namespace vnpu::shared_file
