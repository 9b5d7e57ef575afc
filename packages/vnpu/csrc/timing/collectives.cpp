// Times of collectives, which depend on the machine's links.

#include <algorithm>
#include <string>

#include "device/failure.h"
#include "timing/machine.h"
#include "timing/rates.h"

namespace vnpu::timing {
namespace {

// Steps of a reduce-scatter, a gathering or a broadcast, each of one latency. Within a unit every
// rank is linked to all others (HCCL's mesh): one. Between units HCCL has algorithms with as many
// steps as units (ring), or with the logarithm of their number (recursive halving-doubling, NHR),
// which send the same bytes; so a ring is never faster here.
int64_t steps_of(size_t tier, int64_t span) {
  if (tier == 0) return 1;
  int64_t steps = 0;
  for (int64_t reached = 1; reached < span; reached *= 2) ++steps;
  return steps;
}

}  // namespace

// The units that a group spans in each tier: of ranks that stand `stride` apart, fewer are in one.
std::vector<int64_t> Machine::spans_of(const Collective& collective) const {
  std::vector<int64_t> spans;
  int64_t left = collective.ranks;
  int64_t stride = std::max<int64_t>(collective.stride, 1);
  int64_t size = 1;
  for (const Tier& tier : tiers_) {
    const int64_t span = std::min(left, divide_up(tier.ranks, stride));
    spans.push_back(span);
    left = divide_up(left, span);
    stride = divide_up(stride, tier.ranks);
    size *= tier.ranks;
  }
  if (left > 1) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a group of " + std::to_string(collective.ranks) +
                      " ranks on a topology of " + std::to_string(size) +
                      ". Choose a larger topology, or fewer ranks.");
  }
  return spans;
}

std::vector<Phase> Machine::phases_of(const Collective& collective) const {
  std::vector<Phase> phases;
  const std::vector<int64_t> spans = spans_of(collective);
  const auto bytes = static_cast<Wide>(collective.bytes);
  const auto over_links = [&](size_t tier, Wide amount) {
    const bool is_all_to_all = collective.exchange == Exchange::kAllToAll;
    return time_for(amount, tiers_[tier].bandwidth,
                    is_all_to_all ? tiers_[tier].all_to_all_share : tiers_[tier].share);
  };
  // Tier by tier: within a unit every rank exchanges its part with all others at once, and passes
  // the rest, 1 / span of it, to the next tier.
  const auto sweep = [&](Wide memory_passes, bool outwards) {
    std::vector<Phase> swept;
    Wide part = bytes;
    for (size_t tier = 0; tier < tiers_.size(); ++tier) {
      const auto span = static_cast<Wide>(spans[tier]);
      if (span <= 1) continue;
      Phase phase;
      phase.fixed = tiers_[tier].latency * steps_of(tier, spans[tier]);
      phase.busy[index_of(links(tier))] = over_links(tier, part * (span - 1) / span);
      phase.busy[index_of(Resource::kHbm)] =
          memory_time(static_cast<int64_t>(memory_passes * part));
      swept.push_back(phase);
      part /= span;
    }
    if (!outwards) std::reverse(swept.begin(), swept.end());
    phases.insert(phases.end(), swept.begin(), swept.end());
  };
  switch (collective.exchange) {
    // Memory traffic: the own input is read, the others' inputs are written and read; then the
    // gathering half reads and writes the result.
    case Exchange::kReduceScatter: sweep(3, true); break;
    case Exchange::kAllGather: sweep(2, false); break;
    case Exchange::kAllReduce:
      sweep(3, true);
      sweep(2, false);
      break;
    case Exchange::kBroadcast:
    case Exchange::kAllToAll: {
      // All tiers at once: to each rank goes an equal part.
      Phase phase;
      const auto ranks = static_cast<Wide>(collective.ranks);
      Wide inside = 1;
      for (size_t tier = 0; tier < tiers_.size(); ++tier) {
        const auto span = static_cast<Wide>(spans[tier]);
        if (span > 1) {
          const bool is_direct = collective.exchange == Exchange::kAllToAll;
          const int64_t steps = is_direct ? 1 : steps_of(tier, spans[tier]);
          phase.fixed = std::max(phase.fixed, tiers_[tier].latency * steps);
          const Wide sent = collective.exchange == Exchange::kBroadcast
                                ? bytes
                                : bytes * (inside * (span - 1)) / ranks;
          phase.busy[index_of(links(tier))] = over_links(tier, sent);
        }
        inside *= span;
      }
      phase.busy[index_of(Resource::kHbm)] = memory_time(2 * collective.bytes);
      phases.push_back(phase);
      break;
    }
    case Exchange::kBarrier: {
      Phase phase;
      for (size_t tier = 0; tier < tiers_.size(); ++tier) {
        if (spans[tier] > 1) phase.fixed += tiers_[tier].latency * steps_of(tier, spans[tier]);
      }
      phases.push_back(phase);
      break;
    }
  }
  if (phases.empty()) phases.emplace_back();
  phases.front().fixed += collective_static_;
  return phases;
}

}  // namespace vnpu::timing
