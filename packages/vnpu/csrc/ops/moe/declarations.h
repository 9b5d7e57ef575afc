#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_moe_distribute_combine();
Allowed allowed_moe_distribute_dispatch();
Allowed allowed_moe_finalize_routing_v2();
Allowed allowed_moe_gating_top_k();
Allowed allowed_moe_gating_top_k_softmax_v2();
Allowed allowed_moe_init_routing_v3();
Allowed allowed_moe_re_routing();
void cost_of_moe_distribute_combine(const Call& call, timing::Work& work);
void cost_of_moe_distribute_dispatch(const Call& call, timing::Work& work);
void cost_of_moe_finalize_routing(const Call& call, timing::Work& work);
void cost_of_moe_gating_top_k(const Call& call, timing::Work& work);
void cost_of_moe_init_routing(const Call& call, timing::Work& work);
void cost_of_moe_token_permute(const Call& call, timing::Work& work);
void cost_of_moe_token_unpermute(const Call& call, timing::Work& work);

}  // namespace vnpu::ops
