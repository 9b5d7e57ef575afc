// Fused dispatch of tokens to the ranks of their experts and combination of the results: the
// operators' rows with their own checks. The chips' limits are in distribute_limits.cpp, the
// exchange in expert_exchange.cpp.
//
// Not here: a second group whose two ranks share their tokens (tpWorldSize 2), and int8 on the way
// back (commQuantMode 2). Sources: aclnnMoeDistributeDispatchV2 and aclnnMoeDistributeCombineV2 in
// CANN's operator documentation.

#include <string>

#include "ops/group_operator.h"
#include "ops/moe/distribute_limits.h"
#include "ops/moe/expert_exchange.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

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

TaskPtr dispatch(const Launch& launch, const DistributeArguments& common,
                 const DispatchArguments& a) {
  if (a.x.view.dims != 2 || !is_16_bit(a.x.view)) {
    reject(launch, "x must be float16 or bfloat16 [Bs, H].");
  }
  const ExpertExchange exchange = checked_exchange(launch, common);
  if (a.x.view.sizes[0] != exchange.expert_ids.sizes[0]) {
    reject(launch, "x has " + std::to_string(a.x.view.sizes[0]) + " tokens, expertIds " +
                       std::to_string(exchange.expert_ids.sizes[0]) + ".");
  }
  if (a.quant_mode != kDispatchUnquantized && a.quant_mode != kDispatchDynamic) {
    reject(launch, "quantMode " + std::to_string(a.quant_mode) + "; use 0 none or 2 dynamic.");
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
      reject(launch, "scales must be float32 [" + std::to_string(experts) + ", H].");
    }
  }
  if (a.counts_type != 0 && a.counts_type != 1) {
    reject(launch,
           "expertTokenNumsType " + std::to_string(a.counts_type) + "; use 0 sums or 1 counts.");
  }
  const int64_t here = places.experts_of(common.rank);
  if (a.tokens_per_expert.view.numel() != here || a.ends.view.numel() < here * common.ranks) {
    reject(launch, "expertTokenNums must be [" + std::to_string(here) +
                       "], epRecvCounts at least [" + std::to_string(here * common.ranks) + "].");
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

TaskPtr combine(const Launch& launch, const DistributeArguments& common,
                const CombineArguments& a) {
  if (a.rows.view.dims != 2 || !is_16_bit(a.rows.view)) {
    reject(launch, "expandX must be float16 or bfloat16 [A, H].");
  }
  const ExpertExchange exchange = checked_exchange(launch, common);
  const TensorView& ids = exchange.expert_ids;
  const TensorView& weights = a.weights.view;
  if (weights.dims != 2 || weights.sizes[0] != ids.sizes[0] || weights.sizes[1] != ids.sizes[1] ||
      weights.dtype != at::kFloat) {
    reject(launch, "expertScales must be float32 [Bs, K].");
  }
  if (a.quant_mode != 0) {
    reject(launch, "commQuantMode " + std::to_string(a.quant_mode) + " is not supported; use 0.");
  }
  if (a.shared_x.view.has_value() && common.shared_ranks > 0) {
    reject(launch, "sharedExpertX is for sharedExpertRankNum 0.");
  }
  const int64_t needed = exchange.places.experts_of(common.rank) * common.ranks;
  if (a.ends.view.numel() < needed || a.ends.view.dtype != at::kInt) {
    reject(launch, "epSendCounts must be int32, at least [" + std::to_string(needed) + "].");
  }
  return combine_from_experts(
      exchange, {a.rows.view, a.ends.view, weights, a.shared_x.view, a.sums.view}, launch.touched);
}

}  // namespace

// Limits that depend on the group, or on several numbers at once, are checked in
// distribute_limits.cpp.
static Rules rules_of_moe_distribute_dispatch() {
  return {"aclnnMoeDistributeDispatchV2.md, parameters",
          {{"x", {dtype(kHalves), dims(2, 2)}},
           {"expert_ids", {dtype({at::kInt}), dims(2, 2), same_size(0, "x", 0)}},
           {"smooth", {dtype({at::kFloat}), dims(2, 2)}},
           {"active", dtype({at::kBool})},
           {"weights, row_scales", dtype({at::kFloat})},
           {"quant_mode", one_of(0, 2)},
           {"counts_type", one_of(0, 1)},
           {"rows", dims(2, 2)},
           {"tokens_per_expert", dtype({at::kLong})},
           {"ends", dtype({at::kInt})}},
          {},
          kBigChips};
}
// Sends a row per token and chosen expert; the exchange is priced by its bytes, as read_bytes.
static void cost_of_moe_distribute_dispatch(const Call& call, Work& work) {
  const int64_t size = call.integer("quant_mode", 0) != 0 ? 1 : 2;
  work.read_bytes = call.tensor("expert_ids").numel() * size_of(call.tensor("x"), -1) * size;
}
#define VNPU_DISPATCH_INPUTS                                                                 \
  const TensorIn &x, const TensorIn &expert_ids, const OptionalTensorIn &smooth,             \
      const OptionalTensorIn &active, const OptionalTensorIn &weights, const Text &group,    \
      int64_t ranks, int64_t rank, int64_t experts, const Text &, int64_t tp_ranks, int64_t, \
      int64_t shard_type, int64_t shared, int64_t shared_ranks, int64_t quant_mode,          \
      int64_t global_tokens, int64_t counts_type
#define VNPU_DISPATCH_OUTPUTS                                                                   \
  TensorOut rows, OptionalTensorOut row_scales, TensorOut numbers, TensorOut tokens_per_expert, \
      TensorOut ends, OptionalTensorOut total, OptionalTensorOut row_weights
#define VNPU_DISPATCH_CALL(IN_TRIPLES)                                                             \
  dispatch(launch,                                                                                 \
           {x.view, expert_ids, active, group, ranks, rank, experts, tp_ranks, shard_type, shared, \
            shared_ranks, global_tokens},                                                          \
           {x, smooth, weights, quant_mode, counts_type, IN_TRIPLES, rows, row_scales, numbers,    \
            tokens_per_expert, ends, total, row_weights})
VNPU_GROUP_OPERATOR(MoeDistributeDispatch, (VNPU_DISPATCH_INPUTS, VNPU_DISPATCH_OUTPUTS),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_dispatch,
                     .rules = rules_of_moe_distribute_dispatch()}) {
  return VNPU_DISPATCH_CALL(false);
}

VNPU_GROUP_OPERATOR(MoeDistributeDispatchV2,
                    (VNPU_DISPATCH_INPUTS, const Text&, VNPU_DISPATCH_OUTPUTS),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_dispatch,
                     .rules = rules_of_moe_distribute_dispatch()}) {
  return VNPU_DISPATCH_CALL(true);
}

static Rules rules_of_moe_distribute_combine() {
  return {"aclnnMoeDistributeCombineV2.md, parameters",
          {{"rows", {dtype(kHalves), dims(2, 2)}},
           {"expert_ids", {dtype({at::kInt}), dims(2, 2)}},
           {"ends", dtype({at::kInt})},
           {"weights", {dtype({at::kFloat}), dims(2, 2), same_sizes("expert_ids")}},
           {"active", dtype({at::kBool})},
           {"quant_mode", one_of(0, 2)},
           {"sums", {same_dtype("rows"), dims(2, 2)}}},
          {},
          kBigChips};
}
static void cost_of_moe_distribute_combine(const Call& call, Work& work) {
  work.read_bytes = call.tensor("expert_ids").numel() * size_of(call.tensor("rows"), -1) * 2;
}
#define VNPU_COMBINE_INPUTS                                                                 \
  const TensorIn &rows, const TensorIn &expert_ids, const TensorIn &, const TensorIn &ends, \
      const TensorIn &weights, const OptionalTensorIn &, const OptionalTensorIn &active,    \
      const OptionalTensorIn &, const OptionalTensorIn &, const OptionalTensorIn &,         \
      const OptionalTensorIn &
#define VNPU_COMBINE_SETTINGS                                                                      \
  const Text &group, int64_t ranks, int64_t rank, int64_t experts, const Text &, int64_t tp_ranks, \
      int64_t, int64_t shard_type, int64_t shared, int64_t shared_ranks, int64_t global_tokens,    \
      int64_t, int64_t quant_mode, int64_t
#define VNPU_COMBINE_CALL(SHARED_X)                                                          \
  combine(launch,                                                                            \
          {rows.view, expert_ids, active, group, ranks, rank, experts, tp_ranks, shard_type, \
           shared, shared_ranks, global_tokens},                                             \
          {rows, ends, weights, SHARED_X, quant_mode, sums})
VNPU_GROUP_OPERATOR(MoeDistributeCombine,
                    (VNPU_COMBINE_INPUTS, VNPU_COMBINE_SETTINGS, TensorOut sums),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_combine,
                     .rules = rules_of_moe_distribute_combine()}) {
  return VNPU_COMBINE_CALL({});
}

VNPU_GROUP_OPERATOR(MoeDistributeCombineV2,
                    (VNPU_COMBINE_INPUTS, const OptionalTensorIn& shared_x, VNPU_COMBINE_SETTINGS,
                     const Text&, TensorOut sums),
                    {.tier = kT2,
                     .cost = cost_of_moe_distribute_combine,
                     .rules = rules_of_moe_distribute_combine()}) {
  return VNPU_COMBINE_CALL(shared_x);
}

}  // namespace vnpu::ops
