#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "timing/resources.h"

namespace vnpu::timing {

inline constexpr size_t kGroups = 8;  // tracked groups of a device; further ones share the last

// By group: the number of tasks since its ranks last met, on the path to a point of a stream.
struct Way {
  Time ready = 0;  // when the newest task on it ended
  std::array<uint32_t, kGroups> tasks = {};

  void add_task(Time ended) {
    ready = ended;
    for (uint32_t& each : tasks) ++each;
  }
  // At a join of two paths the later meeting counts.
  void join(const Way& other) {
    if (other.ready > ready) *this = other;
  }
};

// When the ranks of a group arrive at a collective. A task's time varies randomly between ranks, so
// that after n tasks ranks are sqrt(n) times as far apart as after one. The wait for the last of r
// ranks is the expected maximum of r such deviations. A meeting synchronizes its ranks, and the
// ranks of every group within them. Two groups combine: if each rank of a node has met its
// counterpart in another node, and the ranks of each node one another, all ranks of both nodes have
// met, at the older of the two times. For that, other ranks' groups are assumed to be this rank's,
// shifted. Time in which a rank waits for something else before the collective overlaps with the
// others' arrival.
class Arrivals {
 public:
  // The number of the group whose collectives take this turn.
  size_t group_of(int device, const void* turn);
  // Its ranks, ascending, if they are known.
  void place(int device, const void* turn, const std::vector<int64_t>& ranks);
  // All ranks of the group have met at this point of their streams.
  void meet(int device, size_t group, Way& way);

  // The wait for the last rank, at `now`. lateness: the last rank's deviation after one task.
  static Time wait_for_last(Time lateness, uint32_t tasks, Time ready, Time now);
  // Expected deviation of the last of `ranks` ranks after one task since they met. jitter: the
  // standard deviation of a task's time between ranks.
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
  // The groups whose ranks have all met if these groups have met.
  static Groups led_to(OfDevice& device, Groups met);
  std::map<int, OfDevice> devices_;
};

}  // namespace vnpu::timing
