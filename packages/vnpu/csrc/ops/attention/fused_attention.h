#pragma once

#include "ops/attention/fused_attention_call.h"

namespace vnpu::ops {

void run(FusedAttention call);

// True if the tokens of all sequences follow each other; and the number of tokens of an unpaged
// tensor: of one sequence, or of all.
bool has_packed_tokens(std::string_view layout);
int64_t tokens_of(const TensorView& view, std::string_view layout);
void cost_of_attention(const Call& call, Work& work, const std::vector<int64_t>* query_lengths,
                       const std::vector<int64_t>* key_lengths);

}  // namespace vnpu::ops
