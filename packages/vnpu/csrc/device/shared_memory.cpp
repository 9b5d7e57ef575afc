#include "device/shared_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <memory>

#include "device/checked_sizes.h"
#include "device/failure.h"
#include "device/memory_watch.h"
#include "device/shared_file.h"

namespace vnpu {
namespace {

constexpr char kPrefix[] = "vnpu-memory";

// The last page of a file: what importers have to know.
struct Label {
  uint64_t bytes;
  int32_t device;
  uint32_t is_closed;
  uint32_t to_all;
  uint32_t allowed_count;
  int32_t allowed[SharedMemory::kMostProcesses];
};
static_assert(sizeof(Label) <= Memory::kOsPage);

[[noreturn]] void refuse(FailureKind kind, const std::string& why) {
  throw Failure(kind, "vnpu: " + why);
}

Label read_label(int file, size_t at) {
  Label label = {};
  if (::pread(file, &label, sizeof(label), static_cast<off_t>(at)) !=
      static_cast<ssize_t>(sizeof(label))) {
    refuse(FailureKind::kInvalidHandle,
           std::string("the label of shared memory does not read: ") + std::strerror(errno) + ".");
  }
  return label;
}

void write_label(int file, size_t at, const Label& label) {
  if (::pwrite(file, &label, sizeof(label), static_cast<off_t>(at)) !=
      static_cast<ssize_t>(sizeof(label))) {
    refuse(FailureKind::kOutOfMemory,
           std::string("shared memory takes no label: ") + std::strerror(errno) + ".");
  }
}

bool is_allowed(const Label& label) {
  const int32_t* const end = label.allowed + label.allowed_count;
  return label.to_all != 0 || std::find(label.allowed, end, ::getpid()) != end;
}

}  // namespace

// --- Memory's part of sharing ------------------------------------------------------------------

size_t Memory::whole_pages(size_t bytes) { return round_up(bytes, kOsPage); }

Memory::Allocation Memory::allocation_at(const void* begin, const char* function) const {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  std::shared_lock lock(mutex_);
  const auto found = live_.find(at);
  if (found == live_.end() || mapped_.count(at) != 0) {
    refuse(FailureKind::kInvalidArgument,
           std::string(function) + " takes the begin of memory from aclrtMalloc, and this is " +
               describe_locked(at) + ".");
  }
  return found->second;
}

bool Memory::is_in_file(uintptr_t address) const {
  const auto after = files_.upper_bound(address);
  if (after == files_.begin()) return false;
  const auto allocation = live_.find(std::prev(after)->first);
  return allocation != live_.end() && address < allocation->first + allocation->second.bytes;
}

void Memory::move_to_file(const Allocation& allocation, int file) {
  const uintptr_t begin = allocation.begin;
  char* const bytes = reinterpret_cast<char*>(begin + distance_);
  {
    std::unique_lock lock(mutex_);
    if (allocation.bytes < kOsPage) {
      refuse(FailureKind::kInvalidArgument, "memory for other processes has " +
                                                std::to_string(allocation.bytes) +
                                                " bytes, and a virtual NPU gives whole pages of " +
                                                std::to_string(kOsPage) + ": allocate as much.");
    }
    for (size_t done = 0; done < allocation.bytes;) {
      const ssize_t written =
          ::pwrite(file, bytes + done, allocation.bytes - done, static_cast<off_t>(done));
      if (written <= 0) {
        refuse(FailureKind::kOutOfMemory,
               std::string("memory cannot be moved where other processes see it: ") +
                   std::strerror(errno) + ".");
      }
      done += static_cast<size_t>(written);
    }
    if (::mmap(bytes, whole_pages(allocation.bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
               file, 0) == MAP_FAILED) {
      refuse(FailureKind::kInternal, std::string("mmap failed: ") + std::strerror(errno) + ".");
    }
    files_[begin] = file;
  }
  MemoryWatch::instance().changed({begin, begin + allocation.bytes});
}

// --- keys -------------------------------------------------------------------------------------

SharedMemory& SharedMemory::instance() {
  // Never destroyed: torch_npu frees memory after static destructors have run.
  static SharedMemory* const shared = new SharedMemory();
  return *shared;
}

std::string SharedMemory::export_key(const void* begin, size_t bytes, bool to_all) {
  Memory& memory = Memory::instance();
  const Memory::Allocation allocation = memory.allocation_at(begin, "aclrtIpcMemGetExportKey");
  if (bytes == 0 || bytes > allocation.bytes) {
    refuse(FailureKind::kInvalidArgument,
           "aclrtIpcMemGetExportKey of " + std::to_string(bytes) + " bytes of an allocation of " +
               std::to_string(allocation.bytes) + ": export a part of it, or all.");
  }
  const std::lock_guard lock(mutex_);
  // Freed since: the memory has closed their files.
  std::erase_if(exports_, [&](const auto& entry) {
    const Memory::Allocation& before = entry.second.allocation;
    return before.begin == allocation.begin && before.number != allocation.number;
  });
  for (auto& [key, known] : exports_) {
    if (known.allocation.number != allocation.number) continue;
    Label label = read_label(known.file, known.label_at);
    label.bytes = std::max<uint64_t>(label.bytes, bytes);
    label.to_all |= to_all ? 1 : 0;
    label.is_closed = 0;
    write_label(known.file, known.label_at, label);
    return key;
  }
  const uint64_t identity = shared_file::new_identity();
  const size_t pages = Memory::whole_pages(allocation.bytes);
  shared_file::FileDescriptor file = shared_file::make(identity, pages + Memory::kOsPage);
  write_label(file.number, pages,
              Label{bytes, allocation.device, 0, to_all ? uint32_t{1} : uint32_t{0}, 0, {}});
  memory.move_to_file(allocation, file.number);
  std::string key = shared_file::key_of(kPrefix, identity);
  exports_.emplace(key, Export{allocation, file.release(), pages});
  return key;
}

SharedMemory::Export& SharedMemory::exported(const std::string& key) {
  const auto found = exports_.find(key);
  const Memory& memory = Memory::instance();
  if (found != exports_.end()) {
    const Memory::Allocation& allocation = found->second.allocation;
    const auto* const begin = reinterpret_cast<const void*>(allocation.begin);
    if (memory.bytes_at(begin) != 0 &&
        memory.allocation_at(begin, "").number == allocation.number) {
      return found->second;
    }
    exports_.erase(found);
  }
  refuse(FailureKind::kInvalidHandle, "this process has not exported the memory of key '" +
                                          key.substr(0, 64) +
                                          "', or has freed it: keep it until all have closed it.");
}

void SharedMemory::allow(const std::string& key, const std::vector<pid_t>& processes) {
  const std::lock_guard lock(mutex_);
  const Export& known = exported(key);
  Label label = read_label(known.file, known.label_at);
  if (processes.size() > kMostProcesses - label.allowed_count) {
    refuse(FailureKind::kInvalidArgument,
           std::to_string(label.allowed_count + processes.size()) +
               " processes may import one key, and a virtual NPU notes " +
               std::to_string(kMostProcesses) +
               ": export with ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION.");
  }
  std::copy(processes.begin(), processes.end(), label.allowed + label.allowed_count);
  label.allowed_count += static_cast<uint32_t>(processes.size());
  write_label(known.file, known.label_at, label);
}

void* SharedMemory::import(const std::string& key) {
  const uint64_t identity = shared_file::identity_of(kPrefix, key);
  const std::lock_guard lock(mutex_);
  if (const auto known = imports_.find(key); known != imports_.end()) {
    ++known->second.uses;
    return known->second.address;
  }
  shared_file::FileDescriptor file = shared_file::open(identity, "the memory of key '" + key + "'");
  struct stat info = {};
  if (::fstat(file.number, &info) != 0 || static_cast<size_t>(info.st_size) <= Memory::kOsPage) {
    refuse(FailureKind::kInvalidHandle, "what key '" + key + "' names is no shared memory.");
  }
  const size_t pages = static_cast<size_t>(info.st_size) - Memory::kOsPage;
  const Label label = read_label(file.number, pages);
  if (label.bytes == 0 || label.bytes > pages) {
    refuse(FailureKind::kInvalidHandle,
           "what key '" + key + "' names is no memory of aclrtMalloc.");
  }
  if (label.is_closed != 0) {
    refuse(FailureKind::kInvalidHandle, "the memory of key '" + key + "' was closed where it was " +
                                            "exported: import it before.");
  }
  if (!is_allowed(label)) {
    refuse(FailureKind::kInvalidArgument,
           "process " + std::to_string(::getpid()) + " may not import key '" + key +
               "': name it with aclrtIpcMemSetImportPid, or export with "
               "ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION.");
  }
  Memory& memory = Memory::instance();
  auto physical =
      std::make_shared<Memory::Physical>(identity, file.number, pages, label.device, false);
  file.release();
  void* const address = memory.reserve(pages, nullptr);
  try {
    memory.map(address, pages, 0, physical);
  } catch (...) {
    memory.unreserve(address);
    throw;
  }
  imports_.emplace(key, Import{address, 1});
  return address;
}

const void* SharedMemory::last_import(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto known = imports_.find(key);
  return known == imports_.end() || known->second.uses > 1 ? nullptr : known->second.address;
}

void SharedMemory::close(const std::string& key) {
  const std::lock_guard lock(mutex_);
  if (const auto known = imports_.find(key); known != imports_.end()) {
    if (--known->second.uses > 0) return;
    void* const address = known->second.address;
    imports_.erase(known);
    Memory::instance().unmap(address);
    Memory::instance().unreserve(address);
    return;
  }
  const Export& known = exported(key);
  Label label = read_label(known.file, known.label_at);
  label.is_closed = 1;
  write_label(known.file, known.label_at, label);
}

}  // namespace vnpu
