#include "device/shared_records.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "device/failure.h"
#include "device/process.h"
#include "device/shared_file.h"

namespace vnpu {

// All zero bytes are the state before the first record.
struct SharedRecords::Slot {
  std::atomic<uint64_t> asked;  // version
  std::atomic<uint64_t> reached;
  std::atomic<uint64_t> failed;
  std::atomic<int32_t> pid;  // process that records the version
  std::atomic<uint64_t> start_time;
};

struct SharedRecords::Table {
  // Maximum number of an event's records in progress: a later record of the same slot implies that
  // the earlier one was reached.
  static constexpr size_t kSlots = 256;
  std::atomic<uint64_t> recorded;
  Slot slots[kSlots];
};

std::shared_ptr<SharedRecords> SharedRecords::create() {
  const uint64_t identity = shared_file::new_identity();
  shared_file::FileDescriptor file = shared_file::make(identity, sizeof(Table));
  std::shared_ptr<SharedRecords> made(new SharedRecords(identity, file.number));
  file.release();
  return made;
}

std::shared_ptr<SharedRecords> SharedRecords::open(uint64_t identity) {
  shared_file::FileDescriptor file = shared_file::open(identity, "the event");
  struct stat info = {};
  if (::fstat(file.number, &info) != 0 || info.st_size != sizeof(Table)) {
    throw Failure(FailureKind::kInvalidHandle,
                  "vnpu: an event's handle names memory of " + std::to_string(info.st_size) +
                      " bytes: pass on what aclrtIpcGetEventHandle has given.");
  }
  std::shared_ptr<SharedRecords> made(new SharedRecords(identity, file.number));
  file.release();
  return made;
}

SharedRecords::SharedRecords(uint64_t identity, int file) : identity(identity), file_(file) {
  void* const mapped = ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) {
    throw Failure(FailureKind::kOutOfMemory,
                  std::string("vnpu: no memory for an event of several processes: ") +
                      std::strerror(errno) + ".");
  }
  table_ = static_cast<Table*>(mapped);
}

SharedRecords::~SharedRecords() {
  ::munmap(table_, sizeof(Table));
  ::close(file_);
}

SharedRecords::Slot& SharedRecords::slot(uint64_t version) const {
  return table_->slots[version % Table::kSlots];
}

uint64_t SharedRecords::add() {
  const ProcessIdentity self = ProcessIdentity::self();
  const uint64_t version = table_->recorded.fetch_add(1) + 1;
  Slot& own = slot(version);
  own.pid.store(self.pid);
  own.start_time.store(self.start_time);
  own.asked.store(version);
  return version;
}

uint64_t SharedRecords::newest() const { return table_->recorded.load(); }

bool SharedRecords::reached(uint64_t version) const {
  return version == 0 || slot(version).reached.load() >= version;
}

void SharedRecords::reach(uint64_t version, bool failed) {
  Slot& own = slot(version);
  if (failed) own.failed.store(version);
  own.reached.store(version);
}

bool SharedRecords::is_abandoned(uint64_t version) const {
  const Slot& of = slot(version);
  if (reached(version) || of.asked.load() != version) return false;
  return !ProcessIdentity{of.pid.load(), of.start_time.load()}.alive() && !reached(version);
}

void SharedRecords::throw_if_failed(uint64_t version) const {
  const bool is_lost = is_abandoned(version);
  if (!is_lost && (version == 0 || slot(version).failed.load() != version)) return;
  throw Failure(FailureKind::kRemoteLost,
                "vnpu: record " + std::to_string(version) + " of an event that process " +
                    std::to_string(slot(version).pid.load()) + " shares will not come: " +
                    (is_lost ? "the process has ended." : "work before it failed there.") +
                    " Its log says why.");
}

}  // namespace vnpu
