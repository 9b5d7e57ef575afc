// Dispatch of tokens to the ranks of their experts and combination of the results, fused with the
// communication: what the rows take, and what the chips refuse. The exchange itself is in
// expert_exchange.cpp.
//
// Not here: a second group whose two ranks share their tokens (tpWorldSize 2), and int8 on the way
// back (commQuantMode 2). Sources: aclnnMoeDistributeDispatchV2 and aclnnMoeDistributeCombineV2 in
// CANN's operator documentation.

#include <algorithm>

#include "device/configuration.h"
#include "ops/group_operator.h"
#include "ops/moe/declarations.h"
#include "ops/moe/expert_exchange.h"

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

std::string text(int64_t number) { return std::to_string(number); }

// The arguments that both directions have.
struct Arguments {
  const TensorView& rows_of_tokens;  // of which dim 1 is the hidden size
  const TensorIn& expert_ids;
  const OptionalTensorIn& active;
  const Text& group;
  int64_t ranks, rank, experts;
  int64_t tp_ranks, shard_type, shared, shared_ranks;
  int64_t global_tokens;
};

// What the chips take of the group's HCCL buffer, and that all launches divide it alike. Source:
// aclnnMoeDistributeDispatchV2.md, constraints: HCCL_BUFFSIZE and globalBs.
void check_window(const Launch& launch, const Arguments& a, Group& group, int64_t tokens,
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

void check_experts(const Launch& launch, const FusedExperts& chip, const Arguments& a) {
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

ExpertExchange checked(const Launch& launch, const Arguments& a) {
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

bool is_16_bit(const TensorView& view) {
  return view.dtype == at::kHalf || view.dtype == at::kBFloat16;
}

constexpr int64_t kDispatchUnquantized = 0;
constexpr int64_t kDispatchDynamic = 2;

struct DispatchArguments {
  const TensorIn& x;
  const OptionalTensorIn& smooth;
  const OptionalTensorIn& weights;
  int64_t quant_mode, counts_type;
  bool triples;
  const TensorOut& rows;
  const OptionalTensorOut& row_scales;
  const TensorOut& assist;
  const TensorOut& tokens_per_expert;
  const TensorOut& ends;
  const OptionalTensorOut& total;
  const OptionalTensorOut& row_weights;
};

TaskPtr dispatch(const Launch& launch, const Arguments& common, const DispatchArguments& a) {
  if (a.x.view.dims != 2 || !is_16_bit(a.x.view)) {
    reject(launch, "x must be float16 or bfloat16 [Bs, H].");
  }
  const ExpertExchange exchange = checked(launch, common);
  if (a.x.view.sizes[0] != exchange.expert_ids.sizes[0]) {
    reject(launch, "x has " + text(a.x.view.sizes[0]) + " tokens, expertIds " +
                       text(exchange.expert_ids.sizes[0]) + ".");
  }
  if (a.quant_mode != kDispatchUnquantized && a.quant_mode != kDispatchDynamic) {
    reject(launch, "quantMode " + text(a.quant_mode) + "; use 0 none or 2 dynamic.");
  }
  const bool quantized = a.quant_mode == kDispatchDynamic;
  if (a.rows.view.dtype != (quantized ? at::kChar : a.x.view.dtype)) {
    reject(launch, "expandX has the wrong dtype: int8 when quantized, else that of x.");
  }
  if (quantized && !a.row_scales.view.has_value()) {
    reject(launch, "dynamic quantization needs dynamicScales.");
  }
  if (!quantized && a.smooth.view.has_value()) {
    reject(launch, "scales are for quantMode 2.");
  }
  const ExpertPlaces& places = exchange.places;
  if (a.smooth.view.has_value()) {
    const TensorView& smooth = *a.smooth.view;
    const int64_t experts = places.shared_choices() + places.routed;
    if (smooth.dims != 2 || smooth.sizes[0] != experts || smooth.sizes[1] != a.x.view.sizes[1] ||
        smooth.dtype != at::kFloat) {
      reject(launch, "scales must be float32 [" + text(experts) + ", H].");
    }
  }
  if (a.counts_type != 0 && a.counts_type != 1) {
    reject(launch, "expertTokenNumsType " + text(a.counts_type) + "; use 0 sums or 1 counts.");
  }
  const int64_t here = places.experts_of(common.rank);
  if (a.tokens_per_expert.view.numel() != here || a.ends.view.numel() < here * common.ranks) {
    reject(launch, "expertTokenNums must be [" + text(here) + "], epRecvCounts at least [" +
                       text(here * common.ranks) + "].");
  }
  return dispatch_to_experts(
      exchange,
      {a.x.view, a.smooth.view, a.weights.view, quantized, a.counts_type == 0, a.triples,
       a.rows.view, a.row_scales.view, a.assist.view, a.tokens_per_expert.view, a.ends.view,
       a.total.view, a.row_weights.view},
      launch.touched);
}

struct CombineArguments {
  const TensorIn& rows;
  const TensorIn& ends;
  const TensorIn& weights;
  const OptionalTensorIn& shared_x;
  int64_t quant_mode;
  const TensorOut& sums;
};

TaskPtr combine(const Launch& launch, const Arguments& common, const CombineArguments& a) {
  if (a.rows.view.dims != 2 || !is_16_bit(a.rows.view)) {
    reject(launch, "expandX must be float16 or bfloat16 [A, H].");
  }
  const ExpertExchange exchange = checked(launch, common);
  const TensorView& ids = exchange.expert_ids;
  const TensorView& weights = a.weights.view;
  if (weights.dims != 2 || weights.sizes[0] != ids.sizes[0] || weights.sizes[1] != ids.sizes[1] ||
      weights.dtype != at::kFloat) {
    reject(launch, "expertScales must be float32 [Bs, K].");
  }
  if (a.quant_mode != 0) {
    reject(launch, "commQuantMode " + text(a.quant_mode) + " is not supported; use 0.");
  }
  if (a.shared_x.view.has_value() && common.shared_ranks > 0) {
    reject(launch, "sharedExpertX is for sharedExpertRankNum 0.");
  }
  const int64_t needed = exchange.places.experts_of(common.rank) * common.ranks;
  if (a.ends.view.numel() < needed || a.ends.view.dtype != at::kInt) {
    reject(launch, "epSendCounts must be int32, at least [" + text(needed) + "].");
  }
  return combine_from_experts(
      exchange, {a.rows.view, a.ends.view, weights, a.shared_x.view, a.sums.view}, launch.touched);
}

}  // namespace

VNPU_GROUP_OPERATOR(MoeDistributeDispatch,
                    (const TensorIn& x, const TensorIn& expert_ids, const OptionalTensorIn& smooth,
                     const OptionalTensorIn& active, const OptionalTensorIn& weights,
                     const Text& group, int64_t ranks, int64_t rank, int64_t experts, const Text&,
                     int64_t tp_ranks, int64_t, int64_t shard_type, int64_t shared,
                     int64_t shared_ranks, int64_t quant_mode, int64_t global_tokens,
                     int64_t counts_type, TensorOut rows, OptionalTensorOut row_scales,
                     TensorOut numbers, TensorOut tokens_per_expert, TensorOut ends,
                     OptionalTensorOut total, OptionalTensorOut row_weights),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_dispatch,
                     .allowed = allowed_moe_distribute_dispatch}) {
  return dispatch(launch,
                  {x.view, expert_ids, active, group, ranks, rank, experts, tp_ranks, shard_type,
                   shared, shared_ranks, global_tokens},
                  {x, smooth, weights, quant_mode, counts_type, false, rows, row_scales, numbers,
                   tokens_per_expert, ends, total, row_weights});
}

VNPU_GROUP_OPERATOR(MoeDistributeDispatchV2,
                    (const TensorIn& x, const TensorIn& expert_ids, const OptionalTensorIn& smooth,
                     const OptionalTensorIn& active, const OptionalTensorIn& weights,
                     const Text& group, int64_t ranks, int64_t rank, int64_t experts, const Text&,
                     int64_t tp_ranks, int64_t, int64_t shard_type, int64_t shared,
                     int64_t shared_ranks, int64_t quant_mode, int64_t global_tokens,
                     int64_t counts_type, const Text&, TensorOut rows, OptionalTensorOut row_scales,
                     TensorOut triples, TensorOut tokens_per_expert, TensorOut ends,
                     OptionalTensorOut total, OptionalTensorOut row_weights),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_dispatch,
                     .allowed = allowed_moe_distribute_dispatch}) {
  return dispatch(launch,
                  {x.view, expert_ids, active, group, ranks, rank, experts, tp_ranks, shard_type,
                   shared, shared_ranks, global_tokens},
                  {x, smooth, weights, quant_mode, counts_type, true, rows, row_scales, triples,
                   tokens_per_expert, ends, total, row_weights});
}

VNPU_GROUP_OPERATOR(MoeDistributeCombine,
                    (const TensorIn& rows, const TensorIn& expert_ids, const TensorIn&,
                     const TensorIn& ends, const TensorIn& weights, const OptionalTensorIn&,
                     const OptionalTensorIn& active, const OptionalTensorIn&,
                     const OptionalTensorIn&, const OptionalTensorIn&, const OptionalTensorIn&,
                     const Text& group, int64_t ranks, int64_t rank, int64_t experts, const Text&,
                     int64_t tp_ranks, int64_t, int64_t shard_type, int64_t shared,
                     int64_t shared_ranks, int64_t global_tokens, int64_t, int64_t quant_mode,
                     int64_t, TensorOut sums),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_combine,
                     .allowed = allowed_moe_distribute_combine}) {
  return combine(launch,
                 {rows.view, expert_ids, active, group, ranks, rank, experts, tp_ranks, shard_type,
                  shared, shared_ranks, global_tokens},
                 {rows, ends, weights, {}, quant_mode, sums});
}

VNPU_GROUP_OPERATOR(MoeDistributeCombineV2,
                    (const TensorIn& rows, const TensorIn& expert_ids, const TensorIn&,
                     const TensorIn& ends, const TensorIn& weights, const OptionalTensorIn&,
                     const OptionalTensorIn& active, const OptionalTensorIn&,
                     const OptionalTensorIn&, const OptionalTensorIn&, const OptionalTensorIn&,
                     const OptionalTensorIn& shared_x, const Text& group, int64_t ranks,
                     int64_t rank, int64_t experts, const Text&, int64_t tp_ranks, int64_t,
                     int64_t shard_type, int64_t shared, int64_t shared_ranks,
                     int64_t global_tokens, int64_t, int64_t quant_mode, int64_t, const Text&,
                     TensorOut sums),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_combine,
                     .allowed = allowed_moe_distribute_combine}) {
  return combine(launch,
                 {rows.view, expert_ids, active, group, ranks, rank, experts, tp_ranks, shard_type,
                  shared, shared_ranks, global_tokens},
                 {rows, ends, weights, shared_x, quant_mode, sums});
}

}  // namespace vnpu::ops
