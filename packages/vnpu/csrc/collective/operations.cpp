#include "collective/operations.h"

#include <algorithm>
#include <cstring>

#include "collective/collective.h"
#include "collective/reduction.h"
#include "device/checked_sizes.h"
#include "device/memory.h"

namespace vnpu {
namespace {

constexpr size_t kSlot = Segment::kSlot;
// From this size on (bytes, and three ranks) every rank reduces only its share and gathers the
// others': it reads about 2 buffers instead of one per rank, for one more wait.
constexpr size_t kSharedReduction = size_t{64} << 10;

size_t round_down(size_t value, size_t step) { return value / step * step; }

// Rounds of at most `step` bytes that move `bytes`.
uint32_t rounds_of(size_t bytes, size_t step) {
  return static_cast<uint32_t>(std::max<size_t>(1, (bytes + step - 1) / step));
}

// The bytes that one round moves of a buffer of `bytes`.
struct Piece {
  size_t begin;
  size_t bytes;

  Piece(uint32_t round, size_t step, size_t bytes)
      : begin(std::min(size_t{round} * step, bytes)), bytes(std::min(step, bytes - begin)) {}
};

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

// Base of all: the two buffers.
class Exchange : public Collective {
 protected:
  Exchange(const GroupPtr& group, const Announcement& announcement, const void* send,
           size_t send_bytes, void* receive, size_t receive_bytes)
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

  // What all ranks see of this one's buffer in a round.
  SlotUse copy_whole(std::byte* slot, const Piece& piece) const {
    std::memcpy(slot, send_ + piece.begin, piece.bytes);
    return {0, static_cast<uint32_t>(piece.bytes)};
  }
  // What each rank sees of it, `step` bytes apart; the parts are in bytes.
  SlotUse copy_parts(uint32_t round, std::byte* slot, const Partition& parts, size_t step) const {
    size_t largest = 0;
    for (uint32_t r = 0; r < group().ranks(); ++r) {
      const Piece piece(round, step, parts.counts[r]);
      std::memcpy(slot + r * step, send_ + parts.offsets[r] + piece.begin, piece.bytes);
      largest = std::max(largest, piece.bytes);
    }
    return {static_cast<uint32_t>(step), static_cast<uint32_t>(largest)};
  }

  const std::byte* send_ = nullptr;
  std::byte* receive_ = nullptr;

 private:
  void add_access(const void* buffer, size_t bytes, bool write) {
    const auto begin = reinterpret_cast<uintptr_t>(buffer);
    touched.add({begin, begin + bytes, write});
  }
};

// Every rank that needs the result reads all inputs.
class DirectReduction final : public Exchange {
 public:
  DirectReduction(const GroupPtr& group, const Announcement& announcement, const void* send,
                  void* receive, size_t bytes, ElementType type, Reduction reduction)
      : Exchange(group, announcement, send, bytes, receive,
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
class SharedReduction final : public Exchange {
 public:
  SharedReduction(const GroupPtr& group, const Announcement& announcement, const void* send,
                  void* receive, size_t bytes, ElementType type, Reduction reduction)
      : Exchange(group, announcement, send, bytes, receive, bytes),
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

class AllGather final : public Exchange {
 public:
  AllGather(const GroupPtr& group, const Announcement& announcement, const void* send,
            void* receive, Partition parts, size_t extent)
      : Exchange(group, announcement, send, parts.counts[group->rank()], receive, extent),
        parts_(std::move(parts)) {}

 private:
  uint32_t rounds() const override {
    return rounds_of(*std::max_element(parts_.counts.begin(), parts_.counts.end()), kSlot);
  }
  SlotUse put(uint32_t round, std::byte* slot) override {
    return copy_whole(slot, Piece(round, kSlot, parts_.counts[group().rank()]));
  }
  void get(uint32_t round, std::span<const std::byte* const> slots) override {
    for (size_t r = 0; r < slots.size(); ++r) {
      const Piece piece(round, kSlot, parts_.counts[r]);
      std::memcpy(receive_ + parts_.offsets[r] + piece.begin, slots[r], piece.bytes);
    }
  }

  const Partition parts_;  // of receive, in bytes
};

// Bytes of a slot for each rank when every rank gets a part of its own.
size_t part_of_slot(uint32_t ranks) { return round_down(kSlot / ranks, Segment::kCacheLine); }

class ReduceScatter final : public Exchange {
 public:
  ReduceScatter(const GroupPtr& group, const Announcement& announcement, const void* send,
                size_t extent, void* receive, Partition parts, ElementType type,
                Reduction reduction)
      : Exchange(group, announcement, send, extent, receive, parts.counts[group->rank()]),
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

class Broadcast final : public Exchange {
 public:
  Broadcast(const GroupPtr& group, const Announcement& announcement, void* buffer, size_t bytes)
      : Exchange(group, announcement, buffer, group->rank() == announcement.root ? bytes : 0,
                 buffer, group->rank() == announcement.root ? 0 : bytes),
        bytes_(bytes),
        root_(announcement.root) {}

 private:
  uint32_t rounds() const override { return rounds_of(bytes_, kSlot); }
  SlotUse put(uint32_t round, std::byte* slot) override {
    if (group().rank() != root_) return {};
    return copy_whole(slot, Piece(round, kSlot, bytes_));
  }
  void get(uint32_t round, std::span<const std::byte* const> slots) override {
    if (group().rank() == root_) return;
    const Piece piece(round, kSlot, bytes_);
    std::memcpy(receive_ + piece.begin, slots[root_], piece.bytes);
  }

  const size_t bytes_;
  const uint32_t root_;
};

class Scatter final : public Exchange {
 public:
  Scatter(const GroupPtr& group, const Announcement& announcement, const void* send, void* receive,
          size_t bytes)
      : Exchange(group, announcement, send,
                 group->rank() == announcement.root ? bytes_of_all(*group, bytes) : 0, receive,
                 bytes),
        bytes_(bytes),
        step_(part_of_slot(group->ranks())),
        root_(announcement.root) {}

 private:
  static size_t bytes_of_all(const Group& group, size_t bytes) {
    return checked_multiply<size_t>(bytes, group.ranks(), "the size of what a scatter sends");
  }
  uint32_t rounds() const override { return rounds_of(bytes_, step_); }
  SlotUse put(uint32_t round, std::byte* slot) override {
    if (group().rank() != root_) return {};
    return copy_parts(round, slot, Partition::equal(group().ranks(), bytes_), step_);
  }
  void get(uint32_t round, std::span<const std::byte* const> slots) override {
    const Piece piece(round, step_, bytes_);
    std::memcpy(receive_ + piece.begin, slots[root_] + group().rank() * step_, piece.bytes);
  }

  const size_t bytes_;  // per rank
  const size_t step_;
  const uint32_t root_;
};

class AllToAll final : public Exchange {
 public:
  // Partitions and extents in bytes.
  AllToAll(const GroupPtr& group, const Announcement& announcement, const void* send,
           Partition send_parts, size_t send_extent, void* receive, Partition receive_parts,
           size_t receive_extent)
      : Exchange(group, announcement, send, send_extent, receive, receive_extent),
        send_parts_(std::move(send_parts)),
        receive_parts_(std::move(receive_parts)),
        step_(part_of_slot(group->ranks())) {}

 private:
  uint32_t rounds() const override {
    return rounds_of(*std::max_element(send_parts_.counts.begin(), send_parts_.counts.end()),
                     step_);
  }
  void announce_sizes(uint64_t* sizes) override {
    std::copy(send_parts_.counts.begin(), send_parts_.counts.end(), sizes);
    std::copy(receive_parts_.counts.begin(), receive_parts_.counts.end(), sizes + group().ranks());
  }
  // Every rank compares all pairs: all of them fail, or none.
  void compare_sizes() override {
    const uint32_t ranks = group().ranks();
    for (uint32_t from = 0; from < ranks; ++from) {
      const uint64_t* sends = group().segment().sizes(from, sequence());
      for (uint32_t to = 0; to < ranks; ++to) {
        const uint64_t* expects = group().segment().sizes(to, sequence()) + ranks;
        if (sends[to] == expects[from]) continue;
        group().fail(FailureKind::kInvalidArgument,
                     "vnpu: mismatched sizes in " + title() + " of group " + group().name() + ": " +
                         group().describe(from) + " sends " + std::to_string(sends[to]) +
                         " bytes to " + group().describe(to) + ", which expects " +
                         std::to_string(expects[from]) + ".");
      }
    }
  }
  SlotUse put(uint32_t round, std::byte* slot) override {
    return copy_parts(round, slot, send_parts_, step_);
  }
  void get(uint32_t round, std::span<const std::byte* const> slots) override {
    for (uint32_t r = 0; r < group().ranks(); ++r) {
      const Piece piece(round, step_, receive_parts_.counts[r]);
      std::memcpy(receive_ + receive_parts_.offsets[r] + piece.begin,
                  slots[r] + group().rank() * step_, piece.bytes);
    }
  }

  const Partition send_parts_;
  const Partition receive_parts_;
  const size_t step_;
};

class Barrier final : public Exchange {
 public:
  explicit Barrier(const GroupPtr& group)
      : Exchange(group, announce(Operation::kBarrier, ElementType::kUint8, 0), nullptr, 0, nullptr,
                 0) {}

 private:
  uint32_t rounds() const override { return 1; }
  SlotUse put(uint32_t, std::byte*) override { return {}; }
  void get(uint32_t, std::span<const std::byte* const>) override {}
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

TaskPtr all_gather(const GroupPtr& group, const void* send, uint64_t count, void* receive,
                   ElementType type) {
  const Partition parts = Partition::equal(group->ranks(), count);
  return std::make_shared<AllGather>(group, announce(Operation::kAllGather, type, count), send,
                                     receive, in_bytes(parts, type), bytes_of(extent(parts), type));
}

TaskPtr all_gather_v(const GroupPtr& group, const void* send, uint64_t count, void* receive,
                     Partition receive_parts, ElementType type) {
  require_own_count(*group, Operation::kAllGatherV, receive_parts, count);
  const Announcement a =
      with_counts(announce(Operation::kAllGatherV, type, total(receive_parts)), receive_parts);
  const size_t bytes = bytes_of(extent(receive_parts), type);
  return std::make_shared<AllGather>(group, a, send, receive,
                                     in_bytes(std::move(receive_parts), type), bytes);
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

TaskPtr broadcast(const GroupPtr& group, void* buffer, uint64_t count, ElementType type,
                  uint32_t root) {
  const Announcement a = with_root(announce(Operation::kBroadcast, type, count), *group, root);
  return std::make_shared<Broadcast>(group, a, buffer, bytes_of(count, type));
}

TaskPtr scatter(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                ElementType type, uint32_t root) {
  const Announcement a = with_root(announce(Operation::kScatter, type, count), *group, root);
  return std::make_shared<Scatter>(group, a, send, receive, bytes_of(count, type));
}

TaskPtr all_to_all(const GroupPtr& group, const void* send, void* receive, uint64_t count,
                   ElementType type) {
  const Partition parts = Partition::equal(group->ranks(), count);
  const size_t bytes = bytes_of(extent(parts), type);
  return std::make_shared<AllToAll>(group, announce(Operation::kAllToAll, type, count), send,
                                    in_bytes(parts, type), bytes, receive, in_bytes(parts, type),
                                    bytes);
}

TaskPtr all_to_all_v(const GroupPtr& group, const void* send, Partition send_parts,
                     ElementType send_type, void* receive, Partition receive_parts,
                     ElementType receive_type) {
  // Ranks know each other's counts only in pairs; those are compared when they meet.
  const Announcement a = announce(Operation::kAllToAllV, send_type, 0);
  const size_t send_bytes = bytes_of(extent(send_parts), send_type);
  const size_t receive_bytes = bytes_of(extent(receive_parts), receive_type);
  return std::make_shared<AllToAll>(
      group, a, send, in_bytes(std::move(send_parts), send_type), send_bytes, receive,
      in_bytes(std::move(receive_parts), receive_type), receive_bytes);
}

TaskPtr barrier(const GroupPtr& group) { return std::make_shared<Barrier>(group); }

}  // namespace vnpu
