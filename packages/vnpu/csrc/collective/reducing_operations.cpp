// Collectives that reduce.

#include <algorithm>
#include <cstring>

#include "collective/buffer_exchange.h"
#include "collective/operations.h"
#include "collective/reduction.h"

namespace vnpu {
namespace {

// From this size on (bytes, and three ranks) every rank reduces only its share and gathers the
// others': it reads about 2 buffers instead of one per rank, for one more wait.
constexpr size_t kSharedReduction = size_t{64} << 10;

// Every rank that needs the result reads all inputs.
class DirectReduction final : public BufferExchange {
 public:
  DirectReduction(const GroupPtr& group, const Announcement& announcement, const void* send,
                  void* receive, size_t bytes, ElementType type, Reduction reduction)
      : BufferExchange(group, announcement, send, bytes, receive,
                       receives(*group, announcement) ? bytes : 0),
        bytes_(bytes),
        type_(type),
        reduction_(reduction),
        receives_(receives(*group, announcement)) {}

 private:
  static bool receives(const Group& group, const Announcement& announcement) {
    return announcement.root == Announcement::kNone || announcement.root == group.rank();
  }
  uint32_t rounds() const override { return rounds_of(bytes_, kSlot); }
  SlotUse put(uint32_t round, std::byte* slot) override {
    return copy_whole(slot, Piece(round, kSlot, bytes_));
  }
  void get(uint32_t round, std::span<const std::byte* const> slots) override {
    if (!receives_) return;
    const Piece piece(round, kSlot, bytes_);
    reduce(type_, reduction_, slots, receive_ + piece.begin, piece.bytes / size_of(type_));
  }

  const size_t bytes_;
  const ElementType type_;
  const Reduction reduction_;
  const bool receives_;
};

// Pairs of rounds: in the first each rank reduces its share of the piece, in the second it gathers
// the other ranks' shares.
class SharedReduction final : public BufferExchange {
 public:
  SharedReduction(const GroupPtr& group, const Announcement& announcement, const void* send,
                  void* receive, size_t bytes, ElementType type, Reduction reduction)
      : BufferExchange(group, announcement, send, bytes, receive, bytes),
        bytes_(bytes),
        type_(type),
        reduction_(reduction),
        inputs_(group->ranks()) {}

 private:
  uint32_t rounds() const override { return 2 * rounds_of(bytes_, kSlot); }
  Piece share(const Piece& piece, uint32_t rank) const {
    const size_t ranks = group().ranks();
    const size_t step =
        (piece.bytes / ranks + Segment::kCacheLine) / Segment::kCacheLine * Segment::kCacheLine;
    return Piece(rank, step, piece.bytes);
  }
  SlotUse put(uint32_t round, std::byte* slot) override {
    const Piece piece(round / 2, kSlot, bytes_);
    if (round % 2 == 0) return copy_whole(slot, piece);
    const Piece own = share(piece, group().rank());
    std::memcpy(slot, receive_ + piece.begin + own.begin, own.bytes);
    return {0, static_cast<uint32_t>(own.bytes)};
  }
  void get(uint32_t round, std::span<const std::byte* const> slots) override {
    const Piece piece(round / 2, kSlot, bytes_);
    std::byte* target = receive_ + piece.begin;
    if (round % 2 == 0) {
      const Piece own = share(piece, group().rank());
      for (size_t r = 0; r < slots.size(); ++r) inputs_[r] = slots[r] + own.begin;
      reduce(type_, reduction_, inputs_, target + own.begin, own.bytes / size_of(type_));
      return;
    }
    for (uint32_t r = 0; r < slots.size(); ++r) {
      if (r == group().rank()) continue;
      const Piece other = share(piece, r);
      std::memcpy(target + other.begin, slots[r], other.bytes);
    }
  }

  const size_t bytes_;
  const ElementType type_;
  const Reduction reduction_;
  std::vector<const std::byte*> inputs_;
};

class ReduceScatter final : public BufferExchange {
 public:
  ReduceScatter(const GroupPtr& group, const Announcement& announcement, const void* send,
                size_t extent, void* receive, Partition parts, ElementType type,
                Reduction reduction)
      : BufferExchange(group, announcement, send, extent, receive, parts.counts[group->rank()]),
        parts_(std::move(parts)),
        step_(part_of_slot(group->ranks())),
        type_(type),
        reduction_(reduction),
        inputs_(group->ranks()) {}

 private:
  uint32_t rounds() const override {
    return rounds_of(*std::max_element(parts_.counts.begin(), parts_.counts.end()), step_);
  }
  SlotUse put(uint32_t round, std::byte* slot) override {
    return copy_parts(round, slot, parts_, step_);
  }
  void get(uint32_t round, std::span<const std::byte* const> slots) override {
    const Piece piece(round, step_, parts_.counts[group().rank()]);
    for (size_t r = 0; r < slots.size(); ++r) inputs_[r] = slots[r] + group().rank() * step_;
    reduce(type_, reduction_, inputs_, receive_ + piece.begin, piece.bytes / size_of(type_));
  }

  const Partition parts_;  // of send, in bytes
  const size_t step_;
  const ElementType type_;
  const Reduction reduction_;
  std::vector<const std::byte*> inputs_;
};

}  // namespace

TaskPtr all_reduce(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                   ElementType type, Reduction reduction) {
  const Announcement a = announce(Operation::kAllReduce, type, count, reduction);
  const size_t bytes = bytes_of(count, type);
  if (group->ranks() > 2 && bytes >= kSharedReduction) {
    return std::make_shared<SharedReduction>(group, a, send, receive, bytes, type, reduction);
  }
  return std::make_shared<DirectReduction>(group, a, send, receive, bytes, type, reduction);
}

TaskPtr reduce_to(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                  ElementType type, Reduction reduction, uint32_t root) {
  const Announcement a =
      with_root(announce(Operation::kReduce, type, count, reduction), *group, root);
  return std::make_shared<DirectReduction>(group, a, send, receive, bytes_of(count, type), type,
                                           reduction);
}

TaskPtr reduce_scatter(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                       ElementType type, Reduction reduction) {
  const Announcement a = announce(Operation::kReduceScatter, type, count, reduction);
  const Partition parts = Partition::equal(group->ranks(), count);
  return std::make_shared<ReduceScatter>(group, a, send, bytes_of(extent(parts), type), receive,
                                         in_bytes(parts, type), type, reduction);
}

TaskPtr reduce_scatter_v(const GroupPtr& group, const void* send, Partition send_parts,
                         void* receive, uint64_t count, ElementType type, Reduction reduction) {
  require_own_count(*group, Operation::kReduceScatterV, send_parts, count);
  const Announcement a = with_counts(
      announce(Operation::kReduceScatterV, type, total(send_parts), reduction), send_parts);
  const size_t bytes = bytes_of(extent(send_parts), type);
  return std::make_shared<ReduceScatter>(group, a, send, bytes, receive,
                                         in_bytes(std::move(send_parts), type), type, reduction);
}

}  // namespace vnpu
