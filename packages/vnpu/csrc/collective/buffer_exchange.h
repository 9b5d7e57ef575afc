#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "collective/collective.h"
#include "collective/element.h"
#include "collective/group.h"
#include "collective/partition.h"

namespace vnpu {

// The description of a collective that ranks compare. Throws kNotSupported for a dtype that cannot
// be reduced.
Announcement announce(Operation operation, ElementType type, uint64_t count);
Announcement announce(Operation operation, ElementType type, uint64_t count, Reduction reduction);
// Throws kInvalidArgument where the group has no such rank.
Announcement with_root(Announcement announcement, const Group& group, uint32_t root);
Announcement with_counts(Announcement announcement, const Partition& parts);
// Throws kInvalidArgument if the list of counts has another count for this rank.
void require_own_count(const Group& group, Operation operation, const Partition& parts,
                       uint64_t count);

// The bytes that one round moves of a buffer of `bytes`.
struct Piece {
  size_t begin;
  size_t bytes;

  Piece(uint32_t round, size_t step, size_t bytes)
      : begin(std::min(size_t{round} * step, bytes)), bytes(std::min(step, bytes - begin)) {}
};

// A collective with a buffer to send and one to receive into, which passes the ranks' slots in
// rounds.
class BufferExchange : public Collective {
 protected:
  static constexpr size_t kSlot = Segment::kSlot;

  // Throws kIllegalAddress where a buffer of more than 0 bytes is not in one live allocation.
  BufferExchange(const GroupPtr& group, const Announcement& announcement, const void* send,
                 size_t send_bytes, void* receive, size_t receive_bytes);

  // Rounds of at most `step` bytes that move `bytes`.
  static uint32_t rounds_of(size_t bytes, size_t step);
  // Bytes of a slot for each rank when every rank gets a part of its own.
  static size_t part_of_slot(uint32_t ranks);
  // Copies the part of this rank's buffer that all ranks read in a round.
  SlotUse copy_whole(std::byte* slot, const Piece& piece) const;
  // Copies the part that each rank reads, `step` bytes apart; the parts are in bytes.
  SlotUse copy_parts(uint32_t round, std::byte* slot, const Partition& parts, size_t step) const;

  const std::byte* send_ = nullptr;
  std::byte* receive_ = nullptr;

 private:
  void add_access(const void* buffer, size_t bytes, bool write);
};

}  // namespace vnpu
