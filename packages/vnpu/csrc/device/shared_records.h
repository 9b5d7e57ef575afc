#pragma once

#include <cstdint>
#include <memory>

namespace vnpu {

// Records of an event that several processes of this host use, in memory that they share.
class SharedRecords {
 public:
  // Creates the records of a new event. Throws kOutOfMemory.
  static std::shared_ptr<SharedRecords> create();
  // Opens the records of another process's event. Throws kInvalidHandle if that process has none of
  // this identity.
  static std::shared_ptr<SharedRecords> open(uint64_t identity);
  ~SharedRecords();
  SharedRecords(const SharedRecords&) = delete;
  SharedRecords& operator=(const SharedRecords&) = delete;

  const uint64_t identity;  // names it in all processes

  // See Event: versions count from 1 over all processes.
  uint64_t add();
  uint64_t newest() const;
  bool reached(uint64_t version) const;
  void reach(uint64_t version, bool failed);
  bool is_abandoned(uint64_t version) const;
  // Throws kRemoteLost if another process failed, or ended, before it reached this record.
  void throw_if_failed(uint64_t version) const;

 private:
  struct Table;
  struct Slot;
  SharedRecords(uint64_t identity, int file);
  Slot& slot(uint64_t version) const;

  int file_;
  Table* table_;
};

using SharedRecordsPtr = std::shared_ptr<SharedRecords>;

}  // namespace vnpu
