#pragma once

// Sends tokens to the ranks of their experts, and the experts' results back, each in one launch.
//
// Assignments are a token's choices, numbered token by token: assignment a is choice a % k of token
// a / k. On a rank that has experts, rows lie expert by expert, within an expert by the rank that
// they come from, within those in the order of their assignments. Results go the same way back, so
// each rank knows from its own choices which row is whose.

#include <optional>

#include "ops/moe/expert_messages.h"
#include "ops/operator.h"

namespace vnpu::ops {

struct DispatchTensors {
  TensorView x;                       // [tokens, hidden]
  std::optional<TensorView> smooth;   // [experts, hidden], fp32, shared ones first
  std::optional<TensorView> weights;  // [tokens, k], fp32
  bool quantized;                     // int8 rows with a scale each
  bool counts_as_sums;                // tokens_per_expert holds ends instead of counts
  bool triples;                       // assist: rank, token and choice of each row; else, of each
                                      // assignment, its number among those of its expert
  TensorView rows;                    // [capacity, hidden]
  std::optional<TensorView> row_scales;  // [capacity], fp32
  TensorView assist;                     // int32
  TensorView tokens_per_expert;          // [experts here], int64
  TensorView ends;  // [experts here * ranks, ...], int32: where each rank's rows of an expert end
  std::optional<TensorView> total;        // [0 or 1], int32
  std::optional<TensorView> row_weights;  // [capacity], fp32
};
TaskPtr dispatch_to_experts(const ExpertExchange& exchange, const DispatchTensors& tensors,
                            const Touched& touched);

struct CombineTensors {
  TensorView rows;                     // [capacity, hidden]
  TensorView ends;                     // as dispatch gave it
  TensorView weights;                  // [tokens, k], fp32
  std::optional<TensorView> shared_x;  // [tokens, hidden]: added as it is
  TensorView sums;                     // [tokens, hidden]
};
TaskPtr combine_from_experts(const ExpertExchange& exchange, const CombineTensors& tensors,
                             const Touched& touched);

}  // namespace vnpu::ops
