#pragma once

#include <string>

#include "ops/attention/attention.h"

namespace vnpu::ops {

// A call of any of CANN's attention operators. References live as long as the call.
struct FusedAttention {
  const Tensor& query;
  const TensorList& key;
  const TensorList& value;
  int64_t query_heads;
  int64_t key_heads;  // 0: as many as query_heads
  double scale;
  std::string layout;  // of the input, or "input_output"
  SparseMode sparse;
  Tensor out;
  OptionalTensor bias = {}, mask = {};
  OptionalIntArray query_lengths = {}, key_lengths = {};
  OptionalTensor out_scale = {}, out_offset = {};
  OptionalTensor block_table = {};
  int64_t block_size = 0;
  OptionalTensor query_padding = {}, key_padding = {};
  OptionalTensor query_scale = {};
  OptionalTensor key_scale = {}, key_offset = {}, value_scale = {}, value_offset = {};
  int64_t key_quant_mode = 0, value_quant_mode = 0;
  OptionalTensor key_prefix = {}, value_prefix = {};
  OptionalIntArray prefix_length = {};
  OptionalTensor query_rope = {}, key_rope = {};
  OptionalTensor sink = {};
  OptionalTensor lse = {};  // null: not wanted
  OptionalTensor softmax_max = {}, softmax_sum = {};
  double bias_factor = 1;               // of the bias in the scaled scores
  bool single_queries_bounded = false;  // the sparse mode's bounds hold for them as well
};

}  // namespace vnpu::ops
