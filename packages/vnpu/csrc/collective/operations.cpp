// Collectives that move data as it is. Those that reduce it are in reducing_operations.cpp.

#include "collective/operations.h"

#include <algorithm>
#include <cstring>

#include "collective/buffer_exchange.h"
#include "device/checked_sizes.h"

namespace vnpu {
namespace {

class AllGather final : public BufferExchange {
 public:
  AllGather(const GroupPtr& group, const Announcement& announcement, const void* send,
            void* receive, Partition parts, size_t extent)
      : BufferExchange(group, announcement, send, parts.counts[group->rank()], receive, extent),
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

class Broadcast final : public BufferExchange {
 public:
  Broadcast(const GroupPtr& group, const Announcement& announcement, void* buffer, size_t bytes)
      : BufferExchange(group, announcement, buffer, group->rank() == announcement.root ? bytes : 0,
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

class Scatter final : public BufferExchange {
 public:
  Scatter(const GroupPtr& group, const Announcement& announcement, const void* send, void* receive,
          size_t bytes)
      : BufferExchange(group, announcement, send,
                       group->rank() == announcement.root ? bytes_of_all(*group, bytes) : 0,
                       receive, bytes),
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

class AllToAll final : public BufferExchange {
 public:
  // Partitions and extents in bytes.
  AllToAll(const GroupPtr& group, const Announcement& announcement, const void* send,
           Partition send_parts, size_t send_extent, void* receive, Partition receive_parts,
           size_t receive_extent)
      : BufferExchange(group, announcement, send, send_extent, receive, receive_extent),
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

class Barrier final : public BufferExchange {
 public:
  explicit Barrier(const GroupPtr& group)
      : BufferExchange(group, announce(Operation::kBarrier, ElementType::kUint8, 0), nullptr, 0,
                       nullptr, 0) {}

 private:
  uint32_t rounds() const override { return 1; }
  SlotUse put(uint32_t, std::byte*) override { return {}; }
  void get(uint32_t, std::span<const std::byte* const>) override {}
};

}  // namespace

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
