#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_ascend_quant();
Allowed allowed_dequant_bias();
Allowed allowed_dequant_swiglu_quant();
Allowed allowed_dynamic_quant();
Allowed allowed_dynamic_quant_v2();
Allowed allowed_quantize();

}  // namespace vnpu::ops
