#pragma once

#include <string>
#include <vector>

#include "ops/attention/fused_attention_call.h"
#include "ops/attention/key_value_source.h"

namespace vnpu::ops {

// The keys and values of a call, of all its requests.
struct KeysAndValues {
  Source key, value;
  Source key_rope = {};               // if the call has a keyRope
  std::vector<int64_t> lengths = {};  // number of keys of each request
  Tensor table = {};  // of a paged cache: [requests or more, blocks], int32, checked
};

// layout: of the input. head_size: of the queries, in elements. Refuses what does not fit together.
KeysAndValues keys_and_values(const FusedAttention& call, const std::string& layout,
                              int64_t requests, int64_t head_size);

}  // namespace vnpu::ops
