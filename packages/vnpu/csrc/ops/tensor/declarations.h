#pragma once

// What rows of operators refer to: costs of this family (*_costs.cpp), and the calls that its
// documents allow (*_constraints.cpp).

#include "ops/declaration.h"

namespace vnpu::ops {

Allowed allowed_flip();
Allowed allowed_nonzero_v2();
Allowed allowed_repeat_interleave();
Allowed allowed_arange();
Allowed allowed_cast();
Allowed allowed_cat();
Allowed allowed_constant_pad_nd();
Allowed allowed_eye();
Allowed allowed_gather();
Allowed allowed_index();
Allowed allowed_index_add();
Allowed allowed_index_put_impl();
Allowed allowed_index_select();
Allowed allowed_inplace_copy();
Allowed allowed_inplace_fill_scalar();
Allowed allowed_inplace_index_copy();
Allowed allowed_inplace_index_fill();
Allowed allowed_inplace_one();
Allowed allowed_inplace_scatter();
Allowed allowed_inplace_zero();
Allowed allowed_linspace();
Allowed allowed_nonzero();
Allowed allowed_repeat();
Allowed allowed_repeat_interleave_int();
Allowed allowed_scatter();
Allowed allowed_scatter_value();
Allowed allowed_sort();
Allowed allowed_stack();
Allowed allowed_topk();
Allowed allowed_triu();
void cost_of_index(const Call& call, timing::Work& work);
void cost_of_index_put_impl(const Call& call, timing::Work& work);
void cost_of_inplace_index_copy(const Call& call, timing::Work& work);
void cost_of_inplace_scatter(const Call& call, timing::Work& work);
void cost_of_inplace_scatter_update(const Call& call, timing::Work& work);

}  // namespace vnpu::ops
