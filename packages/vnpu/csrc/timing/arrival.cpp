#include "timing/arrival.h"

#include <algorithm>
#include <set>
#include <utility>

namespace vnpu::timing {
namespace {

using Wide = unsigned __int128;

// Expected maximum of 2^i normal values: integrals of x * n * density(x) * distribution(x)^(n - 1).
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
  std::vector<Group>& groups = devices_[device].groups;
  const auto found = std::find_if(groups.begin(), groups.end(),
                                  [turn](const Group& each) { return each.turn == turn; });
  const auto number = static_cast<size_t>(found - groups.begin());
  if (found != groups.end()) return number;
  if (number == kGroups) return kGroups - 1;
  groups.push_back({turn, {}});
  return number;
}

void Arrivals::place(int device, const void* turn, const std::vector<int64_t>& ranks) {
  const size_t number = group_of(device, turn);
  OfDevice& of_device = devices_[device];
  Group& group = of_device.groups[number];
  if (group.ranks == ranks) return;
  group.ranks = ranks;
  of_device.led_to.clear();
}

Arrivals::Groups Arrivals::led_to(OfDevice& device, Groups met) {
  const auto [known, is_new] = device.led_to.try_emplace(met, met);
  if (!is_new) return known->second;
  std::set<int64_t> together;
  for (size_t number = 0; number < device.groups.size(); ++number) {
    const std::vector<int64_t>& ranks = device.groups[number].ranks;
    if ((met >> number & 1) == 0 || ranks.empty()) continue;
    if (together.empty()) {
      together = {ranks.begin(), ranks.end()};
      continue;
    }
    const auto common = std::find_if(ranks.begin(), ranks.end(),
                                     [&together](int64_t rank) { return together.contains(rank); });
    if (common == ranks.end()) continue;  // not both of this rank
    std::set<int64_t> further;
    for (const int64_t one : together) {
      for (const int64_t other : ranks) further.insert(one + other - *common);
    }
    together.swap(further);
  }
  for (size_t number = 0; number < device.groups.size(); ++number) {
    const std::vector<int64_t>& ranks = device.groups[number].ranks;
    if (!ranks.empty() &&
        std::includes(together.begin(), together.end(), ranks.begin(), ranks.end())) {
      known->second |= Groups{1} << number;
    }
  }
  return known->second;
}

void Arrivals::meet(int device, size_t group, Way& way) {
  way.tasks[group] = 0;
  OfDevice& of_device = devices_.at(device);
  const size_t count = of_device.groups.size();
  // From the groups that met last to those that met first.
  std::array<size_t, kGroups> order = {};
  for (size_t number = 0; number < count; ++number) order[number] = number;
  std::sort(order.begin(), order.begin() + count, [&way](size_t one, size_t other) {
    return std::pair(way.tasks[one], one) < std::pair(way.tasks[other], other);
  });
  Groups met = 0;
  for (size_t place = 0; place < count; ++place) {
    const uint32_t tasks = way.tasks[order[place]];
    met |= Groups{1} << order[place];
    const Groups reached = led_to(of_device, met);
    for (size_t other = 0; other < count; ++other) {
      if ((reached >> other & 1) != 0) way.tasks[other] = std::min(way.tasks[other], tasks);
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
