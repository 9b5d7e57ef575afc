#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_avg_pool2d();
Allowed allowed_convolution();
void cost_of_convolution(const Call& call, timing::Work& work);

}  // namespace vnpu::ops
