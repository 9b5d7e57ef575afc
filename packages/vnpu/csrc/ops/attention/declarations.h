#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_attention_update();
Allowed allowed_fused_infer_attention_score_v2();
Allowed allowed_fused_infer_attention_score_v3();
Allowed allowed_fused_infer_attention_score_v4();
Allowed allowed_gather_pa_kv_cache();
Allowed allowed_interleave_rope();
Allowed allowed_kv_rms_norm_rope_cache();
Allowed allowed_lightning_indexer();
Allowed allowed_rope_with_sin_cos_cache();
Allowed allowed_scatter_nd_update();
Allowed allowed_scatter_pa_kv_cache();
Allowed allowed_sparse_flash_attention();
void attend_with_ends(const Call& call, timing::Work& work);
void attend_with_lengths(const Call& call, timing::Work& work);
void cost_of_gather_pa_kv_cache(const Call& call, timing::Work& work);
void cost_of_inplace_quant_scatter(const Call& call, timing::Work& work);
void cost_of_kv_rms_norm_rope_cache(const Call& call, timing::Work& work);
void cost_of_lightning_indexer(const Call& call, timing::Work& work);
void cost_of_rope_with_sin_cos_cache(const Call& call, timing::Work& work);
void cost_of_scatter_pa_kv_cache(const Call& call, timing::Work& work);
void cost_of_sparse_flash_attention(const Call& call, timing::Work& work);
void prolog(const Call& call, timing::Work& work);

}  // namespace vnpu::ops
