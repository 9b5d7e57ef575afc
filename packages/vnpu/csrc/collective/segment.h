#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "device/process.h"

namespace vnpu {

// A rank's description of its current collective, which the others compare.
struct Announcement {
  uint64_t sequence;   // collectives of the group, from 1
  uint32_t operation;  // Operation
  uint32_t type;       // ElementType
  uint32_t reduction;  // Reduction, or kNone
  uint32_t root;       // or kNone
  uint64_t count;      // elements; what they count depends on the operation
  uint64_t signature;  // of the ranks' counts, where they differ
  uint32_t rounds;     // not compared: the largest holds
  static constexpr uint32_t kNone = ~uint32_t{0};
};

// Size of a launch's Python lines, which ranks exchange if races are checked; else they are empty.
constexpr size_t kCallSite = 320;  // bytes

// Why a rank does not join a group's next collective: a collective of another group comes first and
// waits for other ranks.
struct Obstacle {
  std::atomic<uint32_t> state;    // 0 none, 1 being written, 2 valid
  uint64_t sequence;              // of the collective that waits, in its group
  char group[64];                 // identity of that group
  char waiting[kCallSite + 192];  // "all_reduce #3 of group dp, launched at ..."
  char held[kCallSite + 192];     // the collective behind it, in the same form
};

// Lets processes sleep until a rank publishes a change.
struct Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;

  void ring();
  // Sleeps while nothing has rung since `seen` was read from `rings`, at most `limit`.
  void wait(uint32_t seen, std::chrono::microseconds limit);
};

// The address at which ranks of other hosts meet rank 0's, and the secret that proves membership.
struct MeetingPoint {
  char address[64];  // empty: this group stays on one host
  uint32_t port;
  uint8_t secret[32];
};

// The data by which a rank finds a group's segment; the program's store passes it as opaque bytes.
struct Invitation {
  static constexpr uint64_t kMagic = 0x766e7075'67727032;
  uint64_t magic;
  uint64_t pid_namespace;
  ProcessIdentity creator;
  uint32_t user;
  int32_t file;
  char host[256];
  char identity[64];  // the file's name
  MeetingPoint meeting_point;
};

// --- contents of the memory that the ranks of one group share ---------------------------------
// A fresh segment is all zero bytes, and zero is the valid first state of everything in it.

// kLost: a rank of another host to which the connection has ended.
enum class RankState : uint32_t { kAbsent, kArriving, kJoined, kLeft, kLost };

// Bytes of its slot that a rank has written: the first `bytes`, or up to `bytes` from each multiple
// of `stride` on, one part per rank.
struct SlotUse {
  uint32_t stride = 0;  // 0: one part, for all
  uint32_t bytes = 0;
};

struct Round {
  uint64_t sequence;  // of the collective
  SlotUse use;
};

// Data from the first rank of a new group to the group's other ranks, all of which are in this
// group.
struct Offer {
  std::atomic<uint32_t> version;  // even: whole, odd: being written
  uint64_t signature;             // of the new group's ranks and its id; 0: nothing is offered
  Invitation invitation;
};

struct alignas(64) RankBlock {
  std::atomic<uint32_t> state;  // RankState
  ProcessIdentity process;
  int32_t device;  // of the host's devices
  alignas(64) Bell bell;
  alignas(64) std::atomic<uint32_t> posted;  // rounds, of all collectives so far
  Round rounds[2];                           // of the rounds in the two buffers
  // When this host last heard from it, by the host's monotonic clock; of another host's rank only.
  std::atomic<int64_t> heard_ns;
  // Collective n uses announcements[n % 2]: a rank is at most one collective ahead of another.
  alignas(64) Announcement announcements[2];
  char call_sites[2][kCallSite];
  Obstacle obstacle;
  Offer offer;
};

struct alignas(64) SegmentHeader {
  std::atomic<uint32_t> ranks;          // 0 until the first rank has said how many there are
  std::atomic<uint32_t> failure_state;  // 0 none, 1 being written, 2 valid
  uint32_t failure_kind;                // FailureKind
  char failure_text[3584];
};

// Messages from one rank to another: a ring of chunks.
struct alignas(64) Mailbox {
  static constexpr uint32_t kDepth = 4;
  static constexpr size_t kChunk = size_t{256} << 10;  // bytes
  struct Label {
    uint64_t message_bytes;
    uint32_t chunk_bytes;
    uint32_t type;  // ElementType
    char call_site[kCallSite];
  };
  std::atomic<uint32_t> sent;  // chunks
  alignas(64) std::atomic<uint32_t> received;
  Label labels[kDepth];
};

// Shared memory of one group: an anonymous file, so that nothing is left behind however the
// processes end. Pages that are not used cost nothing.
class Segment {
 public:
  static constexpr uint32_t kMaxRanks = 128;
  static constexpr uint32_t kMaxPhantoms = 1024;    // more than the largest topology has
  static constexpr size_t kSlot = size_t{1} << 20;  // bytes of one round of one rank
  static constexpr size_t kCacheLine = 64;  // bytes: pieces of a slot begin at its multiples

  // Makes a new segment. It lives in this process until it is opened or the process ends.
  static Invitation create();
  // Opens the segment of an invitation; `ranks` must be the same for all who open it.
  Segment(const Invitation& invitation, uint32_t ranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // For the creator, when all ranks have opened it: gives up the file behind the invitation.
  static void close_invitation(const Invitation& invitation);

  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(base_); }
  RankBlock& rank(uint32_t rank) const;
  // For `rank` in its collective `sequence` (all-to-all only): the bytes that it sends to each
  // rank, then the bytes that it expects from each.
  uint64_t* sizes(uint32_t rank, uint64_t sequence) const;
  // The slot in which `rank` writes its data of a round.
  std::byte* slot(uint32_t rank, uint32_t round) const;
  Mailbox& mailbox(uint32_t from, uint32_t to) const;
  std::byte* mailbox_chunk(uint32_t from, uint32_t to, uint32_t chunk) const;

 private:
  uint32_t ranks_;
  size_t bytes_ = 0;
  size_t sizes_at_ = 0;
  size_t mailboxes_at_ = 0;
  size_t slots_at_ = 0;
  size_t chunks_at_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace vnpu
