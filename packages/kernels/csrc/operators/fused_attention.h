#pragma once

// One launch of CANN's fused attention for inference, with names for its arguments.

#include <limits>

#include "launch/stage.h"

namespace davinci {

// Values of sparseMode.
inline constexpr int64_t kEveryKey = 0;  // every query sees every key of its request
inline constexpr int64_t kCausal = 3;    // the last query sees the last key
inline constexpr int64_t kAllTokens = std::numeric_limits<int32_t>::max();

struct FusedAttention {
  View query;                      // TND: [tokens, heads, size]
  View key, value;                 // [tokens, heads, size], or [blocks, block_size, heads * size]
  std::optional<View> query_rope;  // rotary parts, if separate from query and key
  std::optional<View> key_rope;
  std::optional<at::Tensor> mask;
  std::optional<at::Tensor> block_table;
  at::IntArrayRef actual_seq_lengths_q;   // cumulative
  at::IntArrayRef actual_seq_lengths_kv;  // per request over a cache, else cumulative
  int64_t heads;
  int64_t key_value_heads;
  double scale;
  const char* layout = "TND";
  int64_t sparse_mode = kEveryKey;
  int64_t pre_tokens = kAllTokens;
  int64_t next_tokens = kAllTokens;
  int64_t block_size = 0;
  bool wants_lse = false;
  View out;
  View lse;  // [0] if not requested
};

// An attention launch with tensors made in advance, for launches that differ only in lengths.
struct PreparedAttention {
  PreparedAttention(Handles& handles, const FusedAttention& call);

  aclTensor* query;
  aclTensorList* key;
  aclTensorList* value;
  aclTensor* query_rope;
  aclTensor* key_rope;
  aclTensor* mask;
  aclTensor* block_table;
  aclTensor* out;
  aclTensor* lse;
  int64_t heads;
  int64_t key_value_heads;
  double scale;
  const char* layout;
  int64_t sparse_mode;
  int64_t pre_tokens;
  int64_t next_tokens;
  int64_t block_size;
  bool wants_lse;
};

void run_attention(Stage& stage, const FusedAttention& call);
void run_attention(Stage& stage, const PreparedAttention& call, aclIntArray* actual_seq_lengths_q,
                   aclIntArray* actual_seq_lengths_kv);

}  // namespace davinci
