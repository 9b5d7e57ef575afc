// Dispatch of tokens to the ranks of their experts and combination of the results, fused with the
// communication: what the rows take, and what of it they refuse. What the chips refuse of both is
// in distribute_limits.cpp, the exchange itself in expert_exchange.cpp.
//
// Not here: a second group whose two ranks share their tokens (tpWorldSize 2), and int8 on the way
// back (commQuantMode 2). Sources: aclnnMoeDistributeDispatchV2 and aclnnMoeDistributeCombineV2 in
// CANN's operator documentation.

#include <string>

#include "ops/group_operator.h"
#include "ops/moe/declarations.h"
#include "ops/moe/distribute_limits.h"
#include "ops/moe/expert_exchange.h"

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
