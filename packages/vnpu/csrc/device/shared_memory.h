#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/memory.h"

namespace vnpu {

// Allocations that several processes of this host use, by key. The allocating process exports an
// allocation; others import it, at addresses of their own.
class SharedMemory {
 public:
  static constexpr size_t kMostProcesses = 1000;  // that may import one key

  static SharedMemory& instance();

  // Exports the first bytes of an allocation; exporting it again returns the same key. to_all: also
  // to processes that `allow` does not name. No task may run meanwhile.
  std::string export_key(const void* begin, size_t bytes, bool to_all);
  // Names processes that may import; those named before stay.
  void allow(const std::string& key, const std::vector<pid_t>& processes);
  // Returns the address of the memory here; again: the same, to be closed as often.
  void* import(const std::string& key);
  // For an imported key: frees the address range. For an exported one: refuses later imports; the
  // memory stays. Throws kInvalidHandle for other keys.
  void close(const std::string& key);
  // The address where a key is imported, if closing it once gives that back; else null.
  const void* last_import(const std::string& key);

 private:
  struct Export {
    Memory::Allocation allocation;
    int file;  // the allocation's
    size_t label_at;
  };
  struct Import {
    void* address;
    int uses;
  };
  Export& exported(const std::string& key);

  std::mutex mutex_;
  std::map<std::string, Export> exports_;
  std::map<std::string, Import> imports_;
};

}  // namespace vnpu
