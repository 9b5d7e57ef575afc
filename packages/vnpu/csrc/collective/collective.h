#pragma once

#include <span>
#include <string>

#include "collective/deadlock.h"
#include "collective/element.h"
#include "collective/group.h"

namespace vnpu {

enum class Operation : uint32_t {
  kAllReduce,
  kReduce,
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kReduceScatterV,
  kBroadcast,
  kScatter,
  kAllToAll,
  kAllToAllV,
  kBarrier,
  kExpertDispatch,
  kExpertCombine,
};

const char* name_of(Operation operation);

// A collective as a sequence of rounds. In each round every rank puts data into its slot and
// announces it; once all ranks have done so, each reads what it needs from the slots. Two buffers
// per rank and one wait per round are enough: a rank that writes round n + 1 has seen all ranks
// write round n, so all have read round n - 1.
class Collective : public GroupTask {
 public:
  ~Collective() override;
  Progress advance() final;
  void wait(std::chrono::microseconds limit) final { group_->wait(seen_, limit); }
  bool waits_outside() const final { return begun_; }
  std::string waiting_for() const final;
  void rewind() final;

  const GroupPtr& member() const final { return group_; }
  uint64_t sequence() const final { return sequence_; }
  const Announcement& announcement() const { return announcement_; }
  const std::string& call_site() const final { return call_site_; }
  bool waits_for(uint32_t rank) const final { return !posted(rank); }
  std::string title() const final;

 protected:
  // `count`, `reduction`, `root` and `signature` must be the same on all ranks.
  Collective(GroupPtr group, const Announcement& announcement);

  // Called first, when everything before it on its stream is done.
  virtual void prepare() {}
  // Number of rounds that this rank needs; the group takes the largest of all.
  virtual uint32_t rounds() const = 0;
  // Copies this rank's data of a round into its slot, and says where it is.
  virtual SlotUse put(uint32_t round, std::byte* slot) = 0;
  // Takes what this rank needs from the slots of all ranks, its own included.
  virtual void get(uint32_t round, std::span<const std::byte* const> slots) = 0;
  // Sizes that are known to pairs of ranks only: announced and compared before the first get.
  virtual void announce_sizes(uint64_t*) {}
  virtual void compare_sizes() {}

  Group& group() const { return *group_; }

 private:
  void begin();
  void compare();
  bool posted(uint32_t rank) const;
  bool all_posted() const;
  void finish();

  const GroupPtr group_;
  const std::string call_site_;                    // empty unless an observer needs it
  std::unique_ptr<DeadlockWatch> deadlock_watch_;  // null unless an observer needs deadlocks
  Announcement announcement_;
  std::atomic<bool> begun_{false};  // atomic where reports read it from other threads
  bool put_ = false;
  uint32_t round_ = 0;  // of this collective
  uint32_t total_ = 0;  // rounds, known after the first
  std::atomic<uint64_t> sequence_{0};
  uint32_t seen_ = 0;  // rings of the bell before the last look at the others
  Group::Wait waited_;
  std::vector<const std::byte*> slots_;
};

}  // namespace vnpu
