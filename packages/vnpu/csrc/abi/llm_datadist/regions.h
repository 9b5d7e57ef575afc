#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace vnpu::transfer {

struct Piece {
  uintptr_t begin;
  uint64_t bytes;
};
uint64_t bytes_of(const std::vector<Piece>& pieces);

// Memory of this process, of a device or the host, that other engines may read and write.
class Regions {
 public:
  // Throws Failure unless it is live memory of that kind.
  void* add(uintptr_t begin, size_t bytes, bool is_device);
  bool remove(void* handle);
  // Whether each lies within one region, whose memory is still live.
  bool hold(const std::vector<Piece>& pieces) const;

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, Piece> live_;  // by handle
  uintptr_t next_ = 0x61647800;
};

// Copies between memory of the program and bytes that go over a socket, while no task runs.
// Transfers take none of the virtual time.
void gather(const std::vector<Piece>& pieces, char* into);
void scatter(const char* from, const std::vector<Piece>& pieces);

}  // namespace vnpu::transfer
