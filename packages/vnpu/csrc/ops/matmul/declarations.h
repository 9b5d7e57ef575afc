#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_add_lora();
Allowed allowed_addmm();
Allowed allowed_batch_mat_mul();
Allowed allowed_grouped_matmul_v4();
Allowed allowed_grouped_matmul_weight_nz();
Allowed allowed_matmul();
Allowed allowed_mm();
Allowed allowed_quant_matmul_v5();
Allowed allowed_quant_matmul_weight_nz();
Allowed allowed_transpose_batch_mat_mul();
Allowed allowed_weight_quant_batch_matmul_v2();
void cost_of_add_lora(const Call& call, timing::Work& work);
void cost_of_addmm(const Call& call, timing::Work& work);
void cost_of_baddbmm(const Call& call, timing::Work& work);
void cost_of_grouped_matmul_finalize_routing_v2(const Call& call, timing::Work& work);
void cost_of_grouped_matmul_swiglu_quant_v2(const Call& call, timing::Work& work);
void cost_of_grouped_matmul_v4(const Call& call, timing::Work& work);
void cost_of_mm(const Call& call, timing::Work& work);
void cost_of_npu_format_cast(const Call& call, timing::Work& work);
void cost_of_quant_matmul_v5(const Call& call, timing::Work& work);
void cost_of_transpose_batch_mat_mul(const Call& call, timing::Work& work);
void cost_of_weight_quant_batch_matmul_v2(const Call& call, timing::Work& work);

}  // namespace vnpu::ops
