#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collective/bridge.h"
#include "collective/meeting.h"
#include "collective/segment.h"
#include "collective/time_limits.h"
#include "device/failure.h"

namespace vnpu {

// One rank's membership in a group of ranks that communicate.
class Group {
 public:
  // Joins without waiting for the other ranks. An empty name takes the invitation's.
  Group(const Meeting& meeting, uint32_t ranks, uint32_t rank, int device, std::string name,
        TimeLimits limits);
  // All ranks are on this host.
  Group(const Invitation& invitation, uint32_t ranks, uint32_t rank, int device, std::string name,
        TimeLimits limits)
      : Group(meet_here(invitation, rank), ranks, rank, device, std::move(name), limits) {}
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Waits until every rank has joined. Throws kRemoteTimeout naming who is missing, kRemoteLost
  // naming who died.
  void await_all();

  const std::string& name() const { return name_; }
  // Equal on all ranks of the group, and different from any other group's.
  std::string identity() const { return meeting_.root.identity; }
  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }
  int device() const { return device_; }
  // The device of a rank that has joined.
  int device_of(uint32_t rank) const { return segment_->rank(rank).device; }
  // Hosts are numbered in the order of their first ranks.
  uint32_t host_of(uint32_t rank) const {
    return meeting_.places.empty() ? 0 : meeting_.places[rank].number;
  }
  Segment& segment() { return *segment_; }

  // Makes a new group of some of this group's ranks: all of them call it, with the same `members`
  // (ranks of this group, in the order of their new ranks) and the same `id`. `join` is given the
  // new group's invitation and returns when all have joined. Throws kRemoteTimeout and kRemoteLost
  // where the first member does not make the group; this group stays whole.
  void derive(const std::vector<uint32_t>& members, uint64_t id,
              const std::function<void(const Invitation&)>& join);

  // "rank 1 (pid 4242)"; where ranks are on several hosts, "rank 1 (host:4242)".
  std::string describe(uint32_t rank) const;

  // --- waiting for other ranks ---------------------------------------------------------------
  uint32_t rings() const { return own().bell.rings.load(std::memory_order_acquire); }
  void wait(uint32_t seen, std::chrono::microseconds limit);
  void ring(uint32_t rank);
  void ring_others();

  // Since when a task has waited for other ranks, and when it last looked whether they live.
  struct Wait {
    std::chrono::steady_clock::time_point begin;
    std::chrono::steady_clock::time_point checked;
    bool waiting = false;
  };
  // For a task that is blocked: throws if an awaited rank has ended or the time is up. Cheap:
  // checks the processes every 50 ms. `missing` tells whether the task still waits for a rank,
  // `what` names it: "all_reduce #12", `call_site` is where it was launched, if known.
  void check(Wait& wait, const std::function<bool(uint32_t)>& missing,
             const std::function<std::string()>& what, const std::string& call_site);

  // --- failure: permanent, of the group and all its ranks --------------------------------------
  bool failed() const { return header().failure_state.load(std::memory_order_acquire) != 0; }
  // Throws the group's failure if there is one.
  void throw_if_failed() const;
  // Makes this the group's failure unless there is one already, and throws the group's.
  [[noreturn]] void fail(FailureKind kind, const std::string& message);
  // Sets the failure without throwing it.
  void set_failure(FailureKind kind, const std::string& message);
  void set_failure(FailureKind kind, const char* message);
  // In a catch clause: makes the current exception the group's failure, so that the other ranks do
  // not wait for this one. Allocates no memory.
  void fail_with_current(const char* task, uint64_t sequence);
  // For watchdogs, which end the process at once: like throw_if_failed(), but only after the
  // program has had time to meet the failure itself and report it.
  void throw_if_failed_for_long();

  // True if it was made by derive(), and so is no global group.
  bool is_derived = false;

  // --- what a communicator has on the device ---------------------------------------------------
  // Bytes of one of its two HCCL buffers, and their device memory where it is taken.
  uint64_t buffer_bytes = 0;
  std::shared_ptr<void> buffers;
  // globalBs of the fused launches of experts, which all of them state alike; 0: none yet.
  std::atomic<int64_t> global_tokens{0};

  // --- order within this process ---------------------------------------------------------------
  // One task at a time runs a collective, or uses one direction of a mailbox.
  struct Turn {
    std::atomic<const void*> holder{nullptr};
    bool take(const void* task);
    void release(const void* task);
  };
  Turn collective_turn;
  std::vector<Turn> send_turns;     // by destination
  std::vector<Turn> receive_turns;  // by source
  // Only the holder of collective_turn changes these:
  std::atomic<uint64_t> collectives{0};  // begun
  std::atomic<uint32_t> rounds{0};       // posted, modulo 2^32
  // Number of collectives that host threads have made, and the thread that made the newest.
  std::atomic<uint64_t> made{0};
  std::atomic<std::thread::id> maker{};

 private:
  SegmentHeader& header() const { return segment_->header(); }
  RankBlock& own() const { return segment_->rank(rank_); }
  RankState state(uint32_t rank) const;
  bool is_here(uint32_t rank) const { return host_of(rank) == host_of(rank_); }
  // The reason not to wait for a rank that has joined, to follow its name; empty if there is none.
  std::string end_of(uint32_t rank) const;
  void fail_if_ended(uint32_t rank, const std::function<bool(uint32_t)>& missing,
                     const std::function<std::string()>& what);

  // Waits for the first member's invitation to a new group with this signature.
  Invitation accept(uint32_t first, uint64_t signature, uint64_t id);
  void offer(uint64_t signature, const Invitation& invitation);

  const Meeting meeting_;
  const std::shared_ptr<Segment> segment_;
  const uint32_t ranks_;
  const uint32_t rank_;
  const pid_t process_;  // that joined
  const int device_;
  const std::string name_;
  const TimeLimits limits_;
  const bool spin_;
  std::shared_ptr<Bridge> bridge_;              // null where all ranks are on this host
  std::atomic<int64_t> failure_noticed_ns_{0};  // 0: none yet
  std::mutex offering_;                         // one new group at a time has this rank as first
  std::mutex accepting_;
  std::map<uint32_t, std::string> accepted_;  // by first member: the newest group's identity
};

using GroupPtr = std::shared_ptr<Group>;

}  // namespace vnpu
