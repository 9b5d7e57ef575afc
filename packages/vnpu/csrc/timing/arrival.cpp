#include "timing/arrival.h"

#include <algorithm>

namespace vnpu::timing {
namespace {

using Wide = unsigned __int128;

// Of 2^i normal values: integrals of x * n * density(x) * distribution(x)^(n - 1).
constexpr std::array<int64_t, 11> kExpectedMaxima = {0,         564'190,   1'029'375, 1'423'600,
                                                     1'765'991, 2'069'669, 2'343'733, 2'594'597,
                                                     2'826'863, 3'043'903, 3'248'240};

// Rounded down.
Time square_root(Wide value) {
  Wide root = 0;
  for (Wide bit = Wide{1} << 62; bit != 0; bit >>= 1) {
    const Wide larger = root | bit;
    if (larger * larger <= value) root = larger;
  }
  return static_cast<Time>(root);
}

}  // namespace

size_t Arrivals::group_of(int device, const void* turn) {
  std::vector<Group>& groups = groups_[device];
  const auto found = std::find_if(groups.begin(), groups.end(),
                                  [turn](const Group& each) { return each.turn == turn; });
  const auto number = static_cast<size_t>(found - groups.begin());
  if (found != groups.end()) return number;
  if (number == kGroups) return kGroups - 1;
  groups.push_back({turn, {}});
  return number;
}

void Arrivals::place(int device, const void* turn, const std::vector<int64_t>& ranks) {
  groups_[device][group_of(device, turn)].ranks = ranks;
}

void Arrivals::meet(int device, size_t group, Way& way) const {
  way.tasks[group] = 0;
  const std::vector<Group>& groups = groups_.at(device);
  const std::vector<int64_t>& met = groups[group].ranks;
  for (size_t other = 0; other < groups.size(); ++other) {
    const std::vector<int64_t>& ranks = groups[other].ranks;
    if (!ranks.empty() && std::includes(met.begin(), met.end(), ranks.begin(), ranks.end())) {
      way.tasks[other] = 0;
    }
  }
}

Time Arrivals::wait_for_last(Time lateness, uint32_t tasks, Time ready, Time now) {
  const auto each = static_cast<Wide>(lateness);
  return std::max<Time>(0, square_root(each * each * tasks) - (now - ready));
}

Time Arrivals::lateness_of_last(Time jitter, int64_t ranks) {
  return static_cast<Time>(static_cast<Wide>(jitter) * static_cast<Wide>(expected_maximum(ranks)) /
                           1'000'000);
}

int64_t Arrivals::expected_maximum(int64_t ranks) {
  for (size_t i = 1; i < kExpectedMaxima.size(); ++i) {
    const int64_t most = int64_t{1} << i;
    if (ranks > most) continue;
    const int64_t below = kExpectedMaxima[i - 1];
    return below + (kExpectedMaxima[i] - below) * (ranks - most / 2) / (most / 2);
  }
  return kExpectedMaxima.back();
}

}  // namespace vnpu::timing
