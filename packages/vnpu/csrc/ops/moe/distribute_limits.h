#pragma once

#include "ops/group_operator.h"
#include "ops/moe/expert_messages.h"

namespace vnpu::ops {

// The arguments that both directions have.
struct DistributeArguments {
  const TensorView& rows_of_tokens;  // of which dim 1 is the hidden size
  const TensorIn& expert_ids;
  const OptionalTensorIn& active;
  const Text& group;
  int64_t ranks, rank, experts;
  int64_t tp_ranks, shard_type, shared, shared_ranks;
  int64_t global_tokens;
};

// The exchange of a launch. Refuses a launch that the chip or this device does not support.
ExpertExchange checked_exchange(const Launch& launch, const DistributeArguments& a);

}  // namespace vnpu::ops
