#include "collective/group.h"

#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <thread>

#include "collective/phantom.h"

namespace vnpu {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Begins the error text of a timed-out wait for a rank, with CANN's code: error_code.json of its
// runtime, Communication_Error_Timeout.
constexpr const char* kNotNotified = "vnpu: EI0002: ";
constexpr milliseconds kLivenessInterval{50};
constexpr milliseconds kArrivalInterval{20};
// Time for other hosts to learn that a rank leaves.
constexpr std::chrono::seconds kLeaveLimit{5};
constexpr std::chrono::seconds kFailureGrace{5};
// Ranks in step meet within this time. Two ranks on two cores, 8 KiB all_reduce and a host sync:
// 17 us with it, 44 us with a sleep at once.
constexpr microseconds kSpin{30};

// Spinning only pays if every rank has a core of its own.
bool has_core_per_rank(uint32_t ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 &&
         static_cast<uint32_t>(CPU_COUNT(&cores)) >= ranks;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Group::Group(const Meeting& meeting, uint32_t ranks, uint32_t rank, int device, std::string name,
             TimeLimits limits)
    : send_turns(ranks),
      receive_turns(ranks),
      meeting_(meeting),
      segment_(std::make_shared<Segment>(meeting.local, ranks)),
      ranks_(ranks),
      rank_(rank),
      process_(::getpid()),
      device_(device),
      name_(name.empty() ? identity() : std::move(name)),
      limits_(limits),
      spin_(meeting.carrier == nullptr && has_core_per_rank(ranks)) {
  if (rank >= ranks) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: rank " + std::to_string(rank) +
                                                     " does not exist in a group of " +
                                                     std::to_string(ranks) + ".");
  }
  RankBlock& block = own();
  auto absent = static_cast<uint32_t>(RankState::kAbsent);
  if (!block.state.compare_exchange_strong(absent, static_cast<uint32_t>(RankState::kArriving))) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: group " + name_ + " has a " +
                                                     describe(rank) +
                                                     " already. Give every process its own rank.");
  }
  block.process = ProcessIdentity::self();
  block.device = device;
  block.state.store(static_cast<uint32_t>(RankState::kJoined), std::memory_order_release);
  if (meeting_.carrier != nullptr) bridge_ = Bridge::start(meeting_, segment_, rank_);
  ring_others();
}

Group::~Group() {
  // A forked copy of a member is no member: the rank itself still exists.
  if (::getpid() != process_) return;
  own().state.store(static_cast<uint32_t>(RankState::kLeft), std::memory_order_release);
  ring_others();
  if (bridge_ != nullptr) bridge_->leave(kLeaveLimit);
}

RankState Group::state(uint32_t rank) const {
  return static_cast<RankState>(segment_->rank(rank).state.load(std::memory_order_acquire));
}

std::string Group::describe(uint32_t rank) const {
  std::string text = "rank " + std::to_string(rank);
  const RankState now = state(rank);
  if (now == RankState::kAbsent || now == RankState::kArriving) return text;
  const std::string where = meeting_.places.empty() ? "pid " : meeting_.places[rank].host + ":";
  return text + " (" + where + std::to_string(segment_->rank(rank).process.pid) + ")";
}

void Group::await_all() {
  if (ranks_are_phantoms()) return;
  const auto absent = [&](uint32_t rank) {
    const RankState now = state(rank);
    return now == RankState::kAbsent || now == RankState::kArriving;
  };
  const auto what = [] { return std::string("the start of the group"); };
  const auto deadline = steady_clock::now() + limits_.connect;
  for (;;) {
    const uint32_t seen = rings();
    throw_if_failed();
    std::string missing;
    uint32_t count = 0;
    for (uint32_t r = 0; r < ranks_; ++r) {
      if (!absent(r)) continue;
      missing += (count++ == 0 ? "rank " : ", rank ") + std::to_string(r);
    }
    if (count == 0) break;
    if (steady_clock::now() >= deadline) {
      fail(FailureKind::kRemoteTimeout,
           "vnpu: group " + name_ + " of " + std::to_string(ranks_) +
               " ranks is incomplete after " + std::to_string(limits_.connect.count()) +
               " s: " + missing +
               " did not join. Look at the output of those processes; a longer wait: "
               "HCCL_CONNECT_TIMEOUT=SECONDS.");
    }
    // An absent rank has no process to check, except for the one that made the invitation.
    for (uint32_t r = 0; r < ranks_; ++r) {
      if (!absent(r)) fail_if_ended(r, [](uint32_t) { return true; }, what);
    }
    const ProcessIdentity& first = meeting_.root.creator;
    if (absent(0) && is_here(0) && !first.alive()) {
      fail(FailureKind::kRemoteLost, "vnpu: rank 0 (pid " + std::to_string(first.pid) +
                                         ") ended before it joined group " + name_ +
                                         ". Its own output says why.");
    }
    own().bell.wait(seen, kArrivalInterval);
  }
  if (meeting_.is_creator) Segment::close_invitation(meeting_.local);
}

void Group::wait(uint32_t seen, microseconds limit) {
  if (spin_) {
    const auto end = steady_clock::now() + std::min(limit, kSpin);
    do {
      for (int i = 0; i < 32; ++i) {
        if (rings() != seen) return;
        pause();
      }
    } while (steady_clock::now() < end);
  }
  own().bell.wait(seen, limit);
}

void Group::ring(uint32_t rank) {
  if (is_here(rank)) {
    segment_->rank(rank).bell.ring();
  } else {
    bridge_->notify();
  }
}

void Group::ring_others() {
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r != rank_ && is_here(r)) ring(r);
  }
  if (bridge_ != nullptr) bridge_->notify();
}

void Group::check(Wait& wait, const std::function<bool(uint32_t)>& missing,
                  const std::function<std::string()>& what, const std::string& call_site) {
  const auto now = steady_clock::now();
  if (!wait.waiting) {
    wait = Wait{now, now, true};
    return;
  }
  if (now - wait.checked < kLivenessInterval) return;
  wait.checked = now;
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (missing(r)) fail_if_ended(r, missing, what);
  }
  if (limits_.execute.count() == 0 || now - wait.begin < limits_.execute) return;
  std::string late;
  std::string newest;
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (!missing(r)) continue;
    late += (late.empty() ? "" : ", ") + describe(r);
    const RankBlock& block = segment_->rank(r);
    const uint64_t sequence =
        std::max(block.announcements[0].sequence, block.announcements[1].sequence);
    const std::string site = block.call_sites[sequence % 2];
    if (site.empty()) continue;
    newest += "\n  " + describe(r) + " launched its #" + std::to_string(sequence) + " at" + site;
  }
  if (late.empty()) return;
  fail(FailureKind::kRemoteTimeout,
       kNotNotified + describe(rank_) + " waited " + std::to_string(limits_.execute.count()) +
           " s in " + what() + " of group " + name_ + " for " + late +
           ". Look at what those processes do; a longer wait: HCCL_EXEC_TIMEOUT=SECONDS." +
           (call_site.empty() ? "" : "\n  " + what() + " was launched at" + call_site) + newest);
}

std::string Group::end_of(uint32_t rank) const {
  if (state(rank) == RankState::kLeft) return " has left the group";
  if (!is_here(rank)) return bridge_->loss_of(rank);
  return segment_->rank(rank).process.alive() ? "" : " ended (killed or crashed?)";
}

void Group::fail_if_ended(uint32_t rank, const std::function<bool(uint32_t)>& missing,
                          const std::function<std::string()>& what) {
  const std::string end = end_of(rank);
  // The rank may have done what we wait for before it ended.
  if (end.empty() || !missing(rank)) return;
  // On a chip a wait for a rank that left in good order times out.
  const bool has_left = state(rank) == RankState::kLeft;
  fail(has_left ? FailureKind::kRemoteTimeout : FailureKind::kRemoteLost,
       (has_left ? kNotNotified : "vnpu: ") + describe(rank) + end + " while " + describe(rank_) +
           " waited for it in " + what() + " of group " + name_ +
           (has_left ? ". All ranks must make the same calls before they destroy a group."
                     : ". Its own output, or the kernel's log, says why."));
}

void Group::throw_if_failed() const {
  SegmentHeader& shared = header();
  if (shared.failure_state.load(std::memory_order_acquire) != 2) return;
  throw Failure(static_cast<FailureKind>(shared.failure_kind), shared.failure_text);
}

void Group::fail(FailureKind kind, const std::string& message) {
  set_failure(kind, message);
  throw_if_failed();
  throw Failure(kind, message);
}

void Group::set_failure(FailureKind kind, const std::string& message) {
  set_failure(kind, message.c_str());
}

void Group::set_failure(FailureKind kind, const char* message) {
  SegmentHeader& shared = header();
  uint32_t none = 0;
  if (shared.failure_state.compare_exchange_strong(none, 1)) {
    shared.failure_kind = static_cast<uint32_t>(kind);
    std::snprintf(shared.failure_text, sizeof(shared.failure_text), "%s", message);
    shared.failure_state.store(2, std::memory_order_release);
    ring_others();
  } else {
    // Another rank was first and is writing its text now, if it is still alive.
    const auto end = steady_clock::now() + milliseconds(20);
    while (shared.failure_state.load(std::memory_order_acquire) != 2 && steady_clock::now() < end) {
      std::this_thread::sleep_for(microseconds(100));
    }
  }
}

void Group::fail_with_current(const char* task, uint64_t sequence) {
  if (failed()) return;
  char text[1024];
  const auto write = [&](const char* cause) {
    char number[24] = "";
    if (sequence > 0)
      std::snprintf(number, sizeof(number), " #%llu", static_cast<unsigned long long>(sequence));
    std::snprintf(text, sizeof(text),
                  "vnpu: rank %u (pid %d) failed in %s%s of group %s and left it unfinished: %s",
                  rank_, static_cast<int>(process_), task, number, name_.c_str(), cause);
  };
  try {
    throw;
  } catch (const std::bad_alloc&) {
    write("its host is out of memory.");
  } catch (const std::exception& e) {
    write(e.what());
  }
  set_failure(FailureKind::kRemoteLost, text);
}

void Group::throw_if_failed_for_long() {
  if (!failed()) return;
  const int64_t now = steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  int64_t noticed = 0;
  if (failure_noticed_ns_.compare_exchange_strong(noticed, now)) return;
  if (now - noticed >= std::chrono::nanoseconds(kFailureGrace).count()) throw_if_failed();
}

bool Group::Turn::take(const void* task) {
  const void* none = nullptr;
  return holder.compare_exchange_strong(none, task, std::memory_order_acquire) || none == task;
}

void Group::Turn::release(const void* task) {
  holder.compare_exchange_strong(task, nullptr, std::memory_order_release);
}

}  // namespace vnpu
