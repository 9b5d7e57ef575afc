#include "collective/collective.h"

#include <algorithm>
#include <cstdio>

#include "collective/phantom.h"
#include "device/configuration.h"
#include "device/faults.h"
#include "device/observer.h"

namespace vnpu {
namespace {

// "all_reduce(4096 x bfloat16, sum)"
std::string describe(const Announcement& a) {
  std::string text = name_of(static_cast<Operation>(a.operation));
  if (static_cast<Operation>(a.operation) == Operation::kBarrier) return text + "()";
  text += "(" + std::to_string(a.count) + " x " + name_of(static_cast<ElementType>(a.type));
  if (a.reduction != Announcement::kNone) {
    text += std::string(", ") + name_of(static_cast<Reduction>(a.reduction));
  }
  if (a.root != Announcement::kNone) text += ", root " + std::to_string(a.root);
  return text + ")";
}

bool same(const Announcement& a, const Announcement& b) {
  return a.sequence == b.sequence && a.operation == b.operation && a.type == b.type &&
         a.reduction == b.reduction && a.root == b.root && a.count == b.count &&
         a.signature == b.signature;
}

}  // namespace

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce: return "all_reduce";
    case Operation::kReduce: return "reduce";
    case Operation::kAllGather: return "all_gather";
    case Operation::kAllGatherV: return "all_gather_v";
    case Operation::kReduceScatter: return "reduce_scatter";
    case Operation::kReduceScatterV: return "reduce_scatter_v";
    case Operation::kBroadcast: return "broadcast";
    case Operation::kScatter: return "scatter";
    case Operation::kAllToAll: return "all_to_all";
    case Operation::kAllToAllV: return "all_to_all_v";
    case Operation::kBarrier: return "barrier";
    case Operation::kExpertDispatch: return "expert_dispatch";
    case Operation::kExpertCombine: return "expert_combine";
  }
  return "unknown operation";
}

Collective::Collective(GroupPtr group, const Announcement& announcement)
    : GroupTask(name_of(static_cast<Operation>(announcement.operation))),
      group_(std::move(group)),
      call_site_(Observers::instance().call_site()),
      announcement_(announcement),
      slots_(group_->ranks()) {
  if (!Observers::instance().needs().deadlocks) return;
  deadlock_watch_ = std::make_unique<DeadlockWatch>();
  group_->made.fetch_add(1);
  group_->maker.store(std::this_thread::get_id());
}

Collective::~Collective() { group_->collective_turn.release(this); }

void Collective::rewind() {
  begun_ = false;
  put_ = false;
  round_ = 0;
  waited_.waiting = false;
}

std::string Collective::title() const {
  return std::string(name) + " #" + std::to_string(sequence_);
}

std::string Collective::waiting_for() const {
  if (!begun_) return "the collective before it in group " + group_->name();
  std::string missing;
  for (uint32_t r = 0; r < group_->ranks(); ++r) {
    if (!posted(r)) missing += (missing.empty() ? "" : ", ") + group_->describe(r);
  }
  return missing + " to join " + title() + " of group " + group_->name();
}

void Collective::begin() {
  begun_ = true;
  faults::reach(faults::Kind::kCollective, name, faults::Phase::kJoin);
  sequence_ = group_->collectives.fetch_add(1) + 1;
  Segment& segment = group_->segment();
  announcement_.sequence = sequence_;
  const bool moves_data = Configuration::instance().compute;
  if (moves_data) prepare();
  announcement_.rounds = moves_data ? rounds() : 1;
  RankBlock& own = segment.rank(group_->rank());
  own.announcements[sequence_ % 2] = announcement_;
  if (deadlock_watch_ != nullptr) {
    std::snprintf(own.call_sites[sequence_ % 2], kCallSite, "%s", call_site_.c_str());
  }
  announce_sizes(segment.sizes(group_->rank(), sequence_));
}

// All ranks must be in the same collective; the round count is the largest that one needs.
void Collective::compare() {
  Segment& segment = group_->segment();
  const Announcement& first = segment.rank(0).announcements[sequence_ % 2];
  total_ = first.rounds;
  for (uint32_t r = 1; r < group_->ranks(); ++r) {
    const Announcement& other = segment.rank(r).announcements[sequence_ % 2];
    if (!same(first, other)) {
      const bool sizes = describe(first) == describe(other);
      const auto site = [&](uint32_t rank) {
        return std::string(segment.rank(rank).call_sites[sequence_ % 2]);
      };
      const auto launched = [&](uint32_t rank, const char* next) {
        return site(rank).empty() ? "" : ", launched at" + site(rank) + next;
      };
      group_->fail(FailureKind::kInvalidArgument,
                   "vnpu: mismatched collectives in group " + group_->name() + ": as its #" +
                       std::to_string(sequence_) + ", " + group_->describe(0) + " runs " +
                       describe(first) + launched(0, "\n   ") + " while " + group_->describe(r) +
                       " runs " + describe(other) + (sizes ? " with other counts per rank" : "") +
                       launched(r, "\n ") + (site(r).empty() ? ". " : " ") +
                       "Every rank must call the same collectives in the same order with the "
                       "same sizes.");
    }
    total_ = std::max(total_, other.rounds);
  }
  compare_sizes();
}

bool Collective::posted(uint32_t rank) const {
  const uint32_t there = group_->segment().rank(rank).posted.load(std::memory_order_acquire);
  return static_cast<int32_t>(there - group_->rounds) >= 0;
}

bool Collective::all_posted() const {
  for (uint32_t r = 0; r < group_->ranks(); ++r) {
    if (!posted(r)) return false;
  }
  return true;
}

void Collective::finish() {
  if (deadlock_watch_ != nullptr) deadlock_watch_->end();
  group_->collective_turn.release(this);
  rewind();
}

Progress Collective::advance() {
  if (ranks_are_phantoms()) return Progress::kDone;
  if (!begun_ && !group_->collective_turn.take(this)) return Progress::kBlocked;
  try {
    group_->throw_if_failed();
    if (!begun_) begin();
    Segment& segment = group_->segment();
    RankBlock& own = segment.rank(group_->rank());
    const bool moves_data = Configuration::instance().compute;
    for (;;) {
      seen_ = group_->rings();
      if (!put_) {
        faults::reach(faults::Kind::kCollective, name, faults::Phase::kPut);
        SlotUse use;
        if (moves_data) use = put(round_, segment.slot(group_->rank(), group_->rounds));
        own.rounds[group_->rounds % 2] = {sequence_, use};
        own.posted.store(++group_->rounds, std::memory_order_release);
        group_->ring_others();
        put_ = true;
        faults::reach(faults::Kind::kCollective, name, faults::Phase::kMeet);
      }
      if (!all_posted()) {
        group_->throw_if_failed();
        group_->check(
            waited_, [this](uint32_t r) { return !posted(r); }, [this] { return title(); },
            call_site_);
        if (deadlock_watch_ != nullptr) deadlock_watch_->look(*this, waited_.begin);
        return Progress::kBlocked;
      }
      waited_.waiting = false;
      if (round_ == 0) compare();
      faults::reach(faults::Kind::kCollective, name, faults::Phase::kGet);
      if (moves_data) {
        for (uint32_t r = 0; r < group_->ranks(); ++r) {
          slots_[r] = segment.slot(r, group_->rounds - 1);
        }
        get(round_, slots_);
      }
      put_ = false;
      if (++round_ >= total_) {
        faults::reach(faults::Kind::kCollective, name, faults::Phase::kEnd);
        finish();
        return Progress::kDone;
      }
    }
  } catch (...) {
    if (begun_) group_->fail_with_current(name, sequence_);
    finish();
    throw;
  }
}

}  // namespace vnpu
