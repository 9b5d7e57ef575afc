#pragma once

#include "ops/attention/fused_attention_call.h"

namespace vnpu::ops {

void run(FusedAttention call);

}  // namespace vnpu::ops
