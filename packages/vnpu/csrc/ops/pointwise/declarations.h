#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_abs();
Allowed allowed_add();
Allowed allowed_adds();
Allowed allowed_bitwise_and_scalar();
Allowed allowed_bitwise_and_tensor();
Allowed allowed_bitwise_not();
Allowed allowed_bitwise_or_tensor();
Allowed allowed_clamp();
Allowed allowed_cos();
Allowed allowed_divs();
Allowed allowed_eq_scalar();
Allowed allowed_eq_tensor();
Allowed allowed_equal();
Allowed allowed_exp();
Allowed allowed_exp2();
Allowed allowed_floor_divides();
Allowed allowed_gelu();
Allowed allowed_gelu_v2();
Allowed allowed_tanh();
Allowed allowed_inplace_add();
Allowed allowed_inplace_addcmul();
Allowed allowed_inplace_bitwise_and_scalar();
Allowed allowed_inplace_log();
Allowed allowed_inplace_masked_fill_scalar();
Allowed allowed_le_tensor();
Allowed allowed_logical_or();
Allowed allowed_lt_scalar();
Allowed allowed_lt_tensor();
Allowed allowed_neg();
Allowed allowed_pow_scalar_tensor();
Allowed allowed_pow_tensor_scalar();
Allowed allowed_remainder_tensor_scalar();
Allowed allowed_right_shift();
Allowed allowed_round();
Allowed allowed_rsubs();
Allowed allowed_s_where();
Allowed allowed_relu();
Allowed allowed_inplace_relu();
Allowed allowed_softplus();
void cost_of_dequant_swiglu_quant(const Call& call, timing::Work& work);
void cost_of_foreach_copy(const Call& call, timing::Work& work);

}  // namespace vnpu::ops
