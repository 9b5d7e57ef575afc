#include "ops/moe/distribute_limits.h"

#include <algorithm>
#include <string>

#include "device/configuration.h"
#include "ops/rules.h"

namespace vnpu::ops {
namespace {

// Of releases after 8.5, on every chip.
constexpr int64_t kMostExperts = 1024;
constexpr int64_t kMostPlaces = 2048;  // a rank's experts times ranks

const FusedExperts& chip_limits(const Launch& launch) {
  const Configuration& configuration = Configuration::instance();
  if (configuration.chip->fused_experts.has_value()) return *configuration.chip->fused_experts;
  reject(launch,
         configuration.soc_name + " has no such operator; Ascend910B and Ascend910_93 have.");
}

// Checks that the group's HCCL buffer has the size that the chip needs, and that all launches
// divide it equally. Source: aclnnMoeDistributeDispatchV2.md, constraints: HCCL_BUFFSIZE and
// globalBs.
void check_window(const Launch& launch, const DistributeArguments& a, Group& group, int64_t tokens,
                  int64_t hidden, int64_t top_k) {
  const Configuration& configuration = Configuration::instance();
  if (!configuration.strict) return;
  const auto aligned = [](int64_t size, int64_t step) { return (size + step - 1) / step * step; };
  const int64_t local =
      std::max<int64_t>(1, a.experts / std::max<int64_t>(1, a.ranks - a.shared_ranks));
  int64_t needed = 0;
  if (!chip_limits(launch).weights_at_dispatch) {
    const int64_t row = aligned(2 * hidden, 512);
    const int64_t row_there = aligned(aligned(2 * hidden, 32) + 64, 512);
    needed = 2 * (local * tokens * a.ranks * row_there + (top_k + a.shared) * tokens * row);
  } else {
    constexpr int64_t kFlags = int64_t{2} << 20;
    needed = 2 * (tokens * a.ranks * std::min(local, top_k) * hidden * 2 + kFlags);
  }
  if (static_cast<uint64_t>(needed) > group.buffer_bytes) {
    throw Failure(
        FailureKind::kTilingRefused,
        std::string(launch.name) + ": globalBs " + text(a.global_tokens) + " of " + text(a.ranks) +
            " ranks takes " + text(needed) + " bytes of group " + group.name() +
            "'s HCCL buffer, which has " + std::to_string(group.buffer_bytes) +
            ". Make the group with a larger hccl_buffer_size, or set HCCL_BUFFSIZE (MiB). "
            "Source: aclnnMoeDistributeDispatchV2.md, constraints of HCCL_BUFFSIZE.");
  }
  if (a.global_tokens == 0) return;
  int64_t before = 0;
  if (!group.global_tokens.compare_exchange_strong(before, a.global_tokens) &&
      before != a.global_tokens) {
    reject(launch, "globalBs is " + text(a.global_tokens) + ", and was " + text(before) +
                       " in an earlier launch of group " + group.name() +
                       ". All launches of a model state the same, for a slower rank may still read "
                       "where this one would write. Source: aclnnMoeDistributeDispatchV2.md, "
                       "globalBs.");
  }
}

void check_experts(const Launch& launch, const FusedExperts& chip, const DistributeArguments& a) {
  const bool is_older = Configuration::instance().cann <= CannRelease::k8_5;
  const int64_t local = a.experts / std::max<int64_t>(1, a.ranks - a.shared_ranks);
  const auto at_most = [&](const char* what, int64_t value, int64_t most) {
    if (value <= most) return;
    reject(launch, "moeExpertNum " + text(a.experts) + " makes " + text(value) + " " + what +
                       ": at most " + text(most) + " on " + Configuration::instance().soc_name +
                       ". Source: aclnnMoeDistributeDispatchV2.md, moeExpertNum.");
  };
  at_most("experts", a.experts, is_older ? chip.max_experts : kMostExperts);
  at_most("experts of a rank", local, is_older ? chip.max_local_experts : kMostExperts);
  at_most("experts of a rank times ranks", local * a.ranks, kMostPlaces);
}

}  // namespace

ExpertExchange checked_exchange(const Launch& launch, const DistributeArguments& a) {
  const FusedExperts& chip = chip_limits(launch);
  const TensorView& ids = a.expert_ids.view;
  if (ids.dims != 2 || ids.dtype != at::kInt) reject(launch, "expertIds must be int32 [Bs, K].");
  const int64_t tokens = ids.sizes[0];
  const int64_t top_k = ids.sizes[1];
  const int64_t hidden = a.rows_of_tokens.sizes[1];
  if (!chip.ranks.has(a.ranks)) {
    reject(launch, "epWorldSize " + text(a.ranks) + " is not among those of " +
                       Configuration::instance().soc_name + ": " + chip.ranks.text() + ".");
  }
  if (!chip.hidden_sizes.has(hidden)) {
    reject(launch, "a hidden size of " + text(hidden) + ": " + Configuration::instance().soc_name +
                       " takes " + chip.hidden_sizes.text() + ".");
  }
  if (tokens < 1 || tokens > chip.max_tokens) {
    reject(launch, text(tokens) + " tokens: at most " + text(chip.max_tokens) +
                       " and at least one are possible. Pad, or call it for parts.");
  }
  if (top_k < 1 || top_k > 16 || top_k > a.experts) {
    reject(launch, "K = " + text(top_k) + " of " + text(a.experts) + " experts; at most 16.");
  }
  check_experts(launch, chip, a);
  const GroupPtr group = group_named(launch, a.group);
  if (a.ranks != group->ranks() || a.rank != group->rank()) {
    reject(launch, "epRankId " + text(a.rank) + " of epWorldSize " + text(a.ranks) +
                       ", but group " + group->name() + " has " + text(group->ranks()) +
                       " ranks, and this is " + text(group->rank()) + ".");
  }
  if (a.tp_ranks > 1) {
    reject(launch, "tpWorldSize " + text(a.tp_ranks) + " is not supported; use 0 or 1.");
  }
  if (a.shard_type != 0) reject(launch, "expertShardType must be 0: shared experts come first.");
  const bool none = a.shared_ranks == 0 && (a.shared == 0 || a.shared == 1);
  const bool some = chip.shared_expert_ranks && a.shared_ranks > 0 && a.shared_ranks < a.ranks &&
                    a.shared > 0 && a.shared_ranks % a.shared == 0;
  if (!none && !some) {
    reject(launch, "sharedExpertNum " + text(a.shared) + " on sharedExpertRankNum " +
                       text(a.shared_ranks) + " of " + text(a.ranks) + " ranks of " +
                       Configuration::instance().soc_name + ".");
  }
  const int64_t routed_ranks = a.ranks - a.shared_ranks;
  if (a.experts < 1 || a.experts % routed_ranks != 0) {
    reject(launch, "moeExpertNum " + text(a.experts) + " does not divide among " +
                       text(routed_ranks) + " ranks.");
  }
  const int64_t most_tokens = a.global_tokens == 0 ? tokens : a.global_tokens / a.ranks;
  if (a.global_tokens % a.ranks != 0 || tokens > most_tokens) {
    reject(launch, "globalBs " + text(a.global_tokens) + " is not the largest number of tokens, " +
                       text(tokens) + " here, times " + text(a.ranks) + " ranks.");
  }
  check_window(launch, a, *group, most_tokens, hidden, top_k);
  if (a.active.view.has_value()) {
    const TensorView& active = *a.active.view;
    const bool fits = (active.dims == 1 || (active.dims == 2 && active.sizes[1] == top_k)) &&
                      active.sizes[0] == tokens && active.dtype == at::kBool;
    if (!fits) reject(launch, "xActiveMask must be bool [Bs] or [Bs, K].");
  }
  return {group, {a.ranks, a.experts, a.shared, a.shared_ranks}, ids, a.active.view, most_tokens};
}

}  // namespace vnpu::ops
