#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_add_rms_norm();
Allowed allowed_add_rms_norm_dynamic_quant();
Allowed allowed_amax();
Allowed allowed_log_sum_exp();
Allowed allowed_any();
Allowed allowed_arg_max();
Allowed allowed_cumprod();
Allowed allowed_cumsum();
Allowed allowed_inplace_normal();
Allowed allowed_inplace_uniform();
Allowed allowed_layer_norm();
Allowed allowed_linalg_vector_norm();
Allowed allowed_max();
Allowed allowed_mean();
Allowed allowed_reduce_sum();
Allowed allowed_rms_norm();
Allowed allowed_softmax();
Allowed allowed_swi_glu();

}  // namespace vnpu::ops
