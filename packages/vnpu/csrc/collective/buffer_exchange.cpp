#include "collective/buffer_exchange.h"

#include <cstring>
#include <string>

#include "device/failure.h"
#include "device/memory.h"

namespace vnpu {

Announcement announce(Operation operation, ElementType type, uint64_t count) {
  return Announcement{0,
                      static_cast<uint32_t>(operation),
                      static_cast<uint32_t>(type),
                      Announcement::kNone,
                      Announcement::kNone,
                      count,
                      0,
                      0};
}

Announcement announce(Operation operation, ElementType type, uint64_t count, Reduction reduction) {
  if (!can_reduce(type)) {
    throw Failure(FailureKind::kNotSupported,
                  std::string("vnpu: ") + name_of(operation) + " cannot reduce " + name_of(type) +
                      "; convert to float16, bfloat16 or float32 first.");
  }
  Announcement announcement = announce(operation, type, count);
  announcement.reduction = static_cast<uint32_t>(reduction);
  return announcement;
}

Announcement with_root(Announcement announcement, const Group& group, uint32_t root) {
  if (root >= group.ranks()) {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: ") + name_of(static_cast<Operation>(announcement.operation)) +
                      " with root " + std::to_string(root) + " in group " + group.name() + " of " +
                      std::to_string(group.ranks()) + " ranks.");
  }
  announcement.root = root;
  return announcement;
}

// FNV-1a over the counts: enough to tell different lists apart.
Announcement with_counts(Announcement announcement, const Partition& parts) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint64_t count : parts.counts) hash = (hash ^ count) * 0x100000001b3;
  announcement.signature = hash;
  return announcement;
}

void require_own_count(const Group& group, Operation operation, const Partition& parts,
                       uint64_t count) {
  if (parts.counts[group.rank()] == count) return;
  throw Failure(FailureKind::kInvalidArgument,
                std::string("vnpu: ") + name_of(operation) + " of group " + group.name() + ": " +
                    group.describe(group.rank()) + " has " + std::to_string(count) +
                    " elements, but the list of counts says " +
                    std::to_string(parts.counts[group.rank()]) + " for it.");
}

BufferExchange::BufferExchange(const GroupPtr& group, const Announcement& announcement,
                               const void* send, size_t send_bytes, void* receive,
                               size_t receive_bytes)
    : Collective(group, announcement) {
  const Memory& memory = Memory::instance();
  if (send_bytes > 0) {
    memory.check(send, send_bytes, (std::string(name) + " (send buffer)").c_str());
    add_access(send, send_bytes, false);
  }
  if (receive_bytes > 0) {
    memory.check(receive, receive_bytes, (std::string(name) + " (receive buffer)").c_str());
    add_access(receive, receive_bytes, true);
  }
  send_ = static_cast<const std::byte*>(memory.backing(send));
  receive_ = static_cast<std::byte*>(memory.backing(receive));
}

uint32_t BufferExchange::rounds_of(size_t bytes, size_t step) {
  return static_cast<uint32_t>(std::max<size_t>(1, (bytes + step - 1) / step));
}

size_t BufferExchange::part_of_slot(uint32_t ranks) {
  return kSlot / ranks / Segment::kCacheLine * Segment::kCacheLine;
}

SlotUse BufferExchange::copy_whole(std::byte* slot, const Piece& piece) const {
  std::memcpy(slot, send_ + piece.begin, piece.bytes);
  return {0, static_cast<uint32_t>(piece.bytes)};
}

SlotUse BufferExchange::copy_parts(uint32_t round, std::byte* slot, const Partition& parts,
                                   size_t step) const {
  size_t largest = 0;
  for (uint32_t r = 0; r < group().ranks(); ++r) {
    const Piece piece(round, step, parts.counts[r]);
    std::memcpy(slot + r * step, send_ + parts.offsets[r] + piece.begin, piece.bytes);
    largest = std::max(largest, piece.bytes);
  }
  return {static_cast<uint32_t>(step), static_cast<uint32_t>(largest)};
}

void BufferExchange::add_access(const void* buffer, size_t bytes, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(buffer);
  touched.add({begin, begin + bytes, write});
}

}  // namespace vnpu
