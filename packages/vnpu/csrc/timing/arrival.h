#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "timing/resources.h"

namespace vnpu::timing {

inline constexpr size_t kGroups = 8;  // of one device that are told apart; more count as the last

// By group: how many tasks have run since its ranks last met, on the way that led to a point of a
// stream.
struct Way {
  Time ready = 0;  // when the newest task on it ended
  std::array<uint32_t, kGroups> tasks = {};

  void add_task(Time ended) {
    ready = ended;
    for (uint32_t& each : tasks) ++each;
  }
  // What came by another way counts where it came later.
  void join(const Way& other) {
    if (other.ready > ready) *this = other;
  }
};

// When the ranks of a group arrive at a collective. A task does not take equally long on all ranks:
// each time is off by a random amount, so that after n tasks ranks stand sqrt(n) times as far apart
// as after one. Who waits for the last of r ranks waits for the expected maximum of r such amounts.
// Ranks that have met stand together again, those of a group within theirs as well. Two groups lead
// further: where each rank of a node has met its counterpart in another node, and the ranks of each
// node one another, all ranks of both have met, at the older of the two times. For that, groups of
// other ranks are taken to be this rank's, shifted. A rank that had to wait for something else
// before the collective could begin has used that time for the others' arrival.
class Arrivals {
 public:
  // The number of the group whose collectives take this turn.
  size_t group_of(int device, const void* turn);
  // Its ranks, ascending, if they are known.
  void place(int device, const void* turn, const std::vector<int64_t>& ranks);
  // All ranks of the group stand at this point of their ways.
  void meet(int device, size_t group, Way& way);

  // The wait for the last rank, at `now`. lateness: of the last rank after one task.
  static Time wait_for_last(Time lateness, uint32_t tasks, Time ready, Time now);
  // Expected lateness of the last of `ranks` ranks after one task since they met. jitter: the
  // deviation of a task's time from rank to rank.
  static Time lateness_of_last(Time jitter, int64_t ranks);
  // The expected maximum of `ranks` independent normal values of deviation 1, in millionths.
  static int64_t expected_maximum(int64_t ranks);

 private:
  // A bit for each group.
  using Groups = uint32_t;
  struct Group {
    const void* turn;
    std::vector<int64_t> ranks;
  };
  struct OfDevice {
    std::vector<Group> groups;
    std::map<Groups, Groups> led_to;  // found so far
  };
  // The groups all of whose ranks have met where these groups have.
  static Groups led_to(OfDevice& device, Groups met);
  std::map<int, OfDevice> devices_;
};

}  // namespace vnpu::timing
