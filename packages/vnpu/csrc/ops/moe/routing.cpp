// Bringing tokens into the order of their experts, and results back into the order of the tokens.
//
// A token with k experts is k assignments, numbered token by token: assignment a is of token a / k.
// Sorting assignments by expert is stable.

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/float_rows.h"
#include "ops/moe/declarations.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"

namespace vnpu::ops {
namespace {

// Assignments in the order of their experts.
struct SortedAssignments {
  Tensor experts;      // [n], int64: the expert of each, ascending
  Tensor assignments;  // [n], int64: which assignment stands here
};

SortedAssignments sort_assignments(const Tensor& expert_index) {
  const auto [experts, order] =
      at::sort(expert_index.reshape({-1}).to(at::kLong), /*stable=*/true, 0, /*descending=*/false);
  return {experts, order};
}

// All assignments, those of a range of experts first: then those of later experts, then those of
// earlier ones, unsorted. The documents leave open what follows the range; so it lies after the
// kernel's sort (moe_init_routing_v3/op_kernel/moe_v3_sort_one_core.h), which op-plugin's test of
// npu_moe_init_routing_v2 expects too.
Tensor in_order_of_range(const Tensor& expert_index, int64_t first_expert) {
  const Tensor experts = expert_index.reshape({-1}).to(at::kLong);
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  return sort_assignments(experts.masked_fill(experts.lt(first_expert), kLast)).assignments;
}

// Where each assignment stands in the order: the inverse permutation.
Tensor positions(const Tensor& assignments) {
  Tensor inverse = at::empty_like(assignments);
  inverse.scatter_(0, assignments, at::arange(assignments.size(0), at::kLong));
  return inverse;
}

Tensor count_experts(const Tensor& experts, int64_t first, int64_t last) {
  const Tensor inside =
      experts.masked_select(experts.ge(first).logical_and(experts.lt(last))) - first;
  return at::bincount(inside, {}, last - first);
}

// x [n, columns] as int8 [n, columns] and scales [n], which are empty in static mode.
struct QuantizedRows {
  Tensor values, scales;
};
constexpr int64_t kUnquantized = -1;
constexpr int64_t kStatic = 0;
constexpr int64_t kDynamic = 1;

QuantizedRows quantize(const Tensor& rows, const OptionalTensor& scale,
                       const OptionalTensor& offset, int64_t mode, const Tensor& experts,
                       int64_t first_expert) {
  Tensor wide = rows.to(at::kFloat);
  if (mode == kStatic) {
    require(scale && offset, "static quantization needs scale and offset.");
    const auto of_rows = [&](const Tensor& parameter) {  // one, or one row per expert
      const Tensor values = parameter.to(at::kFloat);
      return values.numel() == 1 ? values.reshape({})
                                 : values.index_select(0, experts - first_expert);
    };
    return {to_int8(wide * of_rows(*scale) + of_rows(*offset)), {}};
  }
  if (mode != kDynamic) {
    refuse("quantMode " + std::to_string(mode) +
           " is not supported; use -1, 0 static or 1 dynamic.");
  }
  if (scale) {
    wide = wide * (scale->size(0) == 1 ? *scale : scale->index_select(0, experts - first_expert));
  }
  const auto [values, scales] = quantize_rows(wide);
  return {values, scales};
}

struct InitRouting {
  const Tensor& x;             // [tokens, columns]
  const Tensor& expert_index;  // [tokens, k]
  OptionalTensor scale, offset;
  int64_t active_rows, capacity, experts;
  bool drop_and_pad;
  int64_t quant_mode;
  int64_t first_expert, last_expert;  // only these take part
  bool rows_by_position;              // the row index says which assignment stands where
};

struct InitRoutingOut {
  const Tensor& x;
  const Tensor& row_index;
  OptionalTensor scale;
};

// Returns the experts of all assignments, sorted.
Tensor init_routing(const InitRouting& call, const InitRoutingOut& out) {
  const int64_t k = call.expert_index.size(-1);
  const SortedAssignments all = sort_assignments(call.expert_index);
  const Tensor inside =
      all.experts.ge(call.first_expert).logical_and(all.experts.lt(call.last_expert));
  Tensor experts = all.experts.masked_select(inside);
  Tensor assignments = all.assignments.masked_select(inside);

  Tensor place;  // the row of the result that each of these goes to
  if (call.drop_and_pad) {
    if (call.capacity <= 0) refuse("expertCapacity must be positive in drop-and-pad mode.");
    const Tensor counts = count_experts(experts, 0, call.experts);
    const Tensor starts = counts.cumsum(0) - counts;
    const Tensor within = at::arange(experts.size(0), at::kLong) - starts.index_select(0, experts);
    const Tensor fits = within.lt(call.capacity);
    place = (experts * call.capacity + within).masked_select(fits);
    experts = experts.masked_select(fits);
    assignments = assignments.masked_select(fits);
  } else {
    place = at::arange(experts.size(0), at::kLong);
  }

  // The row index covers all assignments.
  Tensor row_index;
  if (call.rows_by_position) {
    row_index = in_order_of_range(call.expert_index, call.first_expert);
  } else {  // -1 marks those without a row
    row_index = at::full({call.expert_index.numel()}, -1, at::kLong);
    row_index.scatter_(0, assignments, place);
  }
  store(out.row_index, row_index.view(out.row_index.sizes()));

  const int64_t columns = call.x.size(-1);
  const Tensor rows_out = out.x.view({-1, columns});
  rows_out.zero_();  // padding, and rows that nothing is routed to
  if (!call.drop_and_pad) {
    int64_t active = std::min(place.size(0), rows_out.size(0));
    if (call.active_rows > 0) active = std::min(active, call.active_rows);
    place = place.narrow(0, 0, active);
    experts = experts.narrow(0, 0, active);
    assignments = assignments.narrow(0, 0, active);
  }
  const Tensor tokens = at::floor_divide(assignments, k);
  const Tensor rows = call.x.index_select(0, tokens);
  if (call.quant_mode == kUnquantized) {
    rows_out.index_copy_(0, place, rows.to(rows_out.scalar_type()));
    if (call.scale && out.scale && out.scale->numel() > 0) {
      out.scale->view({-1}).index_copy_(0, place,
                                        call.scale->reshape({-1}).index_select(0, tokens));
    }
    return all.experts;
  }
  const QuantizedRows quantized =
      quantize(rows, call.scale, call.offset, call.quant_mode, experts, call.first_expert);
  rows_out.index_copy_(0, place, quantized.values);
  if (quantized.scales.defined()) {
    require(out.scale.has_value(), "dynamic quantization needs expandedScaleOut.");
    out.scale->view({-1}).index_copy_(0, place, quantized.scales);
  }
  return all.experts;
}

// Whether nothing is dropped, padded, quantized or converted, as in a model's decode steps.
bool is_plain(const InitRouting& call, const InitRoutingOut& out) {
  return !call.drop_and_pad && call.quant_mode == kUnquantized && !call.scale &&
         !call.rows_by_position && call.x.dim() == 2 && call.x.is_contiguous() &&
         out.x.is_contiguous() && out.x.scalar_type() == call.x.scalar_type() &&
         call.expert_index.scalar_type() == at::kInt && call.expert_index.is_contiguous() &&
         out.row_index.scalar_type() == at::kInt && out.row_index.is_contiguous();
}

// init_routing of a plain call, in one pass. Returns how many assignments each expert of the range
// has.
Tensor route_rows(const InitRouting& call, const InitRoutingOut& out) {
  const int64_t assignments = call.expert_index.numel();
  const int64_t k = call.expert_index.size(-1);
  const auto* const expert = call.expert_index.const_data_ptr<int32_t>();
  auto* const row_index = out.row_index.mutable_data_ptr<int32_t>();
  const int64_t experts = call.last_expert - call.first_expert;
  const auto is_here = [&](int64_t a) {
    return expert[a] >= call.first_expert && expert[a] < call.last_expert;
  };
  const Tensor counts = at::zeros({experts}, at::kLong);
  auto* const count = counts.mutable_data_ptr<int64_t>();
  for (int64_t a = 0; a < assignments; ++a) {
    if (is_here(a)) ++count[expert[a] - call.first_expert];
  }
  std::vector<int64_t> next(static_cast<size_t>(experts));
  int64_t total = 0;
  for (int64_t e = 0; e < experts; ++e) {
    next[static_cast<size_t>(e)] = total;
    total += count[e];
  }
  const size_t row_bytes =
      static_cast<size_t>(call.x.size(1)) * static_cast<size_t>(call.x.element_size());
  const int64_t rows = row_bytes == 0 ? 0 : static_cast<int64_t>(out.x.nbytes() / row_bytes);
  int64_t active = std::min(total, rows);
  if (call.active_rows > 0) active = std::min(active, call.active_rows);
  const auto* const from = static_cast<const char*>(call.x.const_data_ptr());
  auto* const to = static_cast<char*>(out.x.mutable_data_ptr());
  for (int64_t a = 0; a < assignments; ++a) {
    if (!is_here(a)) {
      row_index[a] = -1;
      continue;
    }
    const int64_t row = next[static_cast<size_t>(expert[a] - call.first_expert)]++;
    row_index[a] = static_cast<int32_t>(row);
    if (row < active) {
      std::memcpy(to + static_cast<size_t>(row) * row_bytes,
                  from + static_cast<size_t>(a / k) * row_bytes, row_bytes);
    }
  }
  std::memset(to + static_cast<size_t>(active) * row_bytes, 0,
              static_cast<size_t>(rows - active) * row_bytes);
  return counts;
}

// Older forms leave expertNum at 0 when they neither count nor drop: then every expert takes part.
int64_t last_expert(int64_t experts) {
  return experts > 0 ? experts : std::numeric_limits<int64_t>::max();
}

// How many assignments each expert has: 0 nothing, 1 the ends (cumulative), 2 the counts.
void store_counts(const Tensor& experts, int64_t count, int64_t form, const OptionalOut& out) {
  if (form == 0 || !out || out.tensor->numel() == 0) return;
  const Tensor counts = count_experts(experts, 0, count);
  store(out, form == 1 ? counts.cumsum(0) : counts);
}

// Inverse of routing: the sum of each token's rows, weighted.
struct FinalizeRouting {
  const Tensor& rows;       // [rows, columns], or [experts, capacity, columns]
  const Tensor& row_index;  // [tokens * k]: the row of each assignment; -1: it was dropped
  OptionalTensor skip1, skip2, bias, scales, expert_index;
  bool column_order;  // assignments are numbered choice by choice instead of token by token
};

// The weighted sum alone, of dense tensors of one dtype and, where there are any, weights of that
// dtype. Returns false, having done nothing, for others.
template <class T>
bool sum_rows(const FinalizeRouting& call, int64_t k, const Tensor& out) {
  const auto fits = [](const Tensor& t) {
    return t.scalar_type() == c10::CppTypeToScalarType<T>::value && t.is_contiguous();
  };
  if (!fits(call.rows) || !fits(out) || (call.scales && !fits(*call.scales)) ||
      call.row_index.scalar_type() != at::kInt || !call.row_index.is_contiguous()) {
    return false;
  }
  const int64_t columns = out.size(-1);
  const int64_t row_count = call.rows.numel() / columns;
  const T* const rows = call.rows.const_data_ptr<T>();
  const T* const weight = call.scales ? call.scales->const_data_ptr<T>() : nullptr;
  const auto* const index = call.row_index.const_data_ptr<int32_t>();
  T* const to = out.mutable_data_ptr<T>();
  for (int64_t a = 0; a < call.row_index.numel(); ++a) {
    if (index[a] >= row_count) {
      refuse("expandedRowIdx[" + std::to_string(a) + "] is " + std::to_string(index[a]) +
             ", there are " + std::to_string(row_count) + " rows.");
    }
  }
  constexpr int64_t kGrainElements = 32768;  // work worth a second thread
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, columns * k));
  at::parallel_for(0, out.size(0), grain, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(columns));
    std::vector<float> row(static_cast<size_t>(columns));
    for (int64_t token = begin; token < end; ++token) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t a = token * k; a < (token + 1) * k; ++a) {
        if (index[a] < 0) continue;  // dropped, or on another device
        float_rows::load(rows + index[a] * columns, row.data(), columns);
        // Rounded before the addition, as models define it: a fused multiply-add would not.
        if (weight != nullptr) {
          float_rows::multiply(row.data(), static_cast<float>(weight[a]), row.data(), columns);
        }
        float_rows::add(sum.data(), row.data(), sum.data(), columns);
      }
      float_rows::store(sum.data(), to + token * columns, columns);
    }
  });
  return true;
}

void finalize_routing(const FinalizeRouting& call, const Out& out) {
  if (out.tensor.numel() == 0) return;
  const int64_t columns = call.rows.size(-1);
  const int64_t k = call.scales ? call.scales->size(1)
                                : call.row_index.numel() / std::max<int64_t>(1, out.tensor.size(0));
  const int64_t tokens = out.tensor.size(0);
  if (call.row_index.numel() != tokens * k) {
    refuse("expandedRowIdx has " + std::to_string(call.row_index.numel()) + " entries for " +
           std::to_string(tokens) + " tokens with " + std::to_string(k) + " experts each.");
  }
  if (!call.skip1 && !call.skip2 && !call.bias && !call.column_order &&
      (sum_rows<float>(call, k, out.tensor) || sum_rows<at::BFloat16>(call, k, out.tensor) ||
       sum_rows<at::Half>(call, k, out.tensor))) {
    return;
  }
  const Tensor rows = call.rows.reshape({-1, columns}).to(at::kFloat);
  Tensor index = call.row_index.to(at::kLong);
  index = call.column_order ? index.view({k, tokens}) : index.view({tokens, k}).t();
  Tensor sum = at::zeros(out.tensor.sizes(), at::kFloat);
  if (call.skip1) sum = sum + call.skip1->to(at::kFloat);
  if (call.skip2) sum = sum + call.skip2->to(at::kFloat);
  for (int64_t i = 0; i < k; ++i) {
    const Tensor which = index[i];
    Tensor part =
        rows.index_select(0, which.clamp_min(0)).masked_fill(which.lt(0).unsqueeze(-1), 0);
    if (call.bias) {
      require(call.expert_index.has_value(), "bias needs the experts of the tokens.");
      part =
          part +
          call.bias->to(at::kFloat).index_select(0, call.expert_index->select(1, i).to(at::kLong));
    }
    if (call.scales) part = part * call.scales->select(1, i).to(at::kFloat).unsqueeze(-1);
    sum = sum + part;
  }
  store(out, sum);
}

}  // namespace

VNPU_OPERATOR(MoeInitRouting,
              (const Tensor& x, const Tensor& row_index, const Tensor& expert_index, int64_t,
               Out x_out, Out row_index_out, Out expert_index_out),
              {.tier = kT2, .cost = cost_of_moe_init_routing}) {
  // The oldest form: rows carry numbers, and a number modulo the tokens is the token.
  if (x.numel() == 0) return;
  const SortedAssignments all = sort_assignments(expert_index);
  const Tensor numbers = row_index.reshape({-1}).to(at::kLong).index_select(0, all.assignments);
  store(row_index_out, positions(numbers));
  store(expert_index_out, all.experts);
  const Tensor active = numbers.narrow(0, 0, x_out.tensor.size(0));
  store(x_out, x.index_select(0, active.remainder(x.size(0))));
}

VNPU_OPERATOR(MoeInitRoutingV2,
              (const Tensor& x, const Tensor& expert_index, int64_t active_rows, int64_t capacity,
               int64_t experts, int64_t drop_pad_mode, int64_t count_form, bool counts_before_drop,
               Out x_out, Out row_index_out, OptionalOut counts_out, OptionalOut before_drop_out),
              {.tier = kT2, .cost = cost_of_moe_init_routing}) {
  const Tensor sorted = init_routing({x,
                                      expert_index,
                                      {},
                                      {},
                                      active_rows,
                                      capacity,
                                      experts,
                                      drop_pad_mode == 1,
                                      kUnquantized,
                                      0,
                                      last_expert(experts),
                                      false},
                                     {x_out.tensor, row_index_out.tensor, {}});
  store_counts(sorted, experts, count_form, counts_out);
  if (counts_before_drop) store_counts(sorted, experts, 2, before_drop_out);
}

VNPU_OPERATOR(MoeInitRoutingV3,
              (const Tensor& x, const Tensor& expert_index, const OptionalTensor& scale,
               const OptionalTensor& offset, int64_t active_rows, int64_t capacity, int64_t experts,
               int64_t drop_pad_mode, int64_t count_form, bool wants_counts, int64_t quant_mode,
               const IntArray& active_range, int64_t row_index_type, Out x_out, Out row_index_out,
               OptionalOut counts_out, OptionalOut scale_out),
              {.tier = kT2,
               .cost = cost_of_moe_init_routing,
               .allowed = allowed_moe_init_routing_v3}) {
  const int64_t first = active_range.size() == 2 ? active_range[0] : 0;
  const int64_t last = active_range.size() == 2 ? active_range[1] : experts;
  if (first < 0 || last > experts || first > last) {
    refuse("activeExpertRange [" + std::to_string(first) + ", " + std::to_string(last) +
           ") is not within the " + std::to_string(experts) + " experts.");
  }
  if (row_index_type == 1 && drop_pad_mode == 1) {
    refuse("rowIdxType 1 (scatter) has no meaning in drop-and-pad mode.");
  }
  const InitRouting call{x,           expert_index, scale,   offset,
                         active_rows, capacity,     experts, drop_pad_mode == 1,
                         quant_mode,  first,        last,    row_index_type == 1};
  const InitRoutingOut out{x_out.tensor, row_index_out.tensor, scale_out.tensor};
  const bool counts_asked = wants_counts && counts_out && counts_out.tensor->numel() > 0;
  Tensor counts;
  if (is_plain(call, out)) {
    counts = route_rows(call, out);
  } else {
    const Tensor sorted = init_routing(call, out);
    if (counts_asked) counts = count_experts(sorted, first, last);
  }
  if (!counts_asked) return;
  if (count_form == 0) {
    store(counts_out, counts.cumsum(0));
  } else if (count_form == 1) {
    store(counts_out, counts);
  } else {  // pairs (expert, count) of the experts that have any, then zeros
    const Tensor used = counts.nonzero().squeeze(-1);
    counts_out.tensor->zero_();
    counts_out.tensor->narrow(0, 0, used.size(0))
        .copy_(at::stack({used + first, counts.index_select(0, used)}, 1));
  }
}

VNPU_OPERATOR(MoeInitRoutingQuantV2,
              (const Tensor& x, const Tensor& expert_index, const OptionalTensor& scale,
               const OptionalTensor& offset, int64_t active_rows, int64_t capacity, int64_t experts,
               int64_t drop_pad_mode, int64_t count_form, bool counts_before_drop,
               int64_t quant_mode, Out x_out, Out row_index_out, OptionalOut counts_out,
               OptionalOut before_drop_out, OptionalOut scale_out),
              {.tier = kT2, .cost = cost_of_moe_init_routing}) {
  const Tensor sorted =
      init_routing({x, expert_index, scale, offset, active_rows, capacity, experts,
                    drop_pad_mode == 1, quant_mode, 0, last_expert(experts), false},
                   {x_out.tensor, row_index_out.tensor, scale_out.tensor});
  store_counts(sorted, experts, count_form, counts_out);
  if (counts_before_drop) store_counts(sorted, experts, 2, before_drop_out);
}

VNPU_OPERATOR(MoeFinalizeRouting,
              (const Tensor& rows, const Tensor& skip1, const OptionalTensor& skip2,
               const OptionalTensor& bias, const OptionalTensor& scales, const Tensor& row_index,
               const OptionalTensor& expert_index, Out out),
              {.tier = kT2, .cost = cost_of_moe_finalize_routing}) {
  finalize_routing({rows, row_index, skip1, skip2, bias, scales, expert_index, true}, out);
}

VNPU_OPERATOR(MoeFinalizeRoutingV2,
              (const Tensor& rows, const Tensor& row_index, const OptionalTensor& skip1,
               const OptionalTensor& skip2, const OptionalTensor& bias,
               const OptionalTensor& scales, const OptionalTensor& expert_index,
               int64_t drop_pad_mode, Out out),
              {.tier = kT2,
               .cost = cost_of_moe_finalize_routing,
               .allowed = allowed_moe_finalize_routing_v2}) {
  // 0 and 2 dropless, 1 and 3 drop-and-pad; 0 and 1 number the assignments choice by choice.
  if (drop_pad_mode < 0 || drop_pad_mode > 3) {
    refuse("dropPadMode " + std::to_string(drop_pad_mode) + " is not known; use 0 to 3.");
  }
  finalize_routing({rows, row_index, skip1, skip2, bias, scales, expert_index, drop_pad_mode < 2},
                   out);
}

VNPU_OPERATOR(MoeTokenPermute,
              (const Tensor& tokens, const Tensor& indices, int64_t out_tokens, bool padded_mode,
               Out permuted, Out sorted_indices),
              {.tier = kT2, .cost = cost_of_moe_token_permute}) {
  require(!padded_mode, "paddedMode is not supported by the device either.");
  if (indices.numel() == 0) return;
  const int64_t k = indices.dim() == 1 ? 1 : indices.size(1);
  const SortedAssignments all = sort_assignments(indices);
  store(sorted_indices, positions(all.assignments));
  const int64_t rows = permuted.tensor.size(0);  // outTokens, or all when it is 0 or negative
  require(out_tokens <= indices.numel() && rows <= indices.numel(),
          "numOutTokens exceeds the tokens.");
  store(permuted, tokens.index_select(0, at::floor_divide(all.assignments.narrow(0, 0, rows), k)));
}

VNPU_OPERATOR(MoeTokenUnpermute,
              (const Tensor& permuted, const Tensor& sorted_indices, const OptionalTensor& weights,
               bool padded_mode, const OptionalIntArray&, Out out),
              {.tier = kT2, .cost = cost_of_moe_token_unpermute}) {
  require(!padded_mode, "paddedMode is not supported by the device either.");
  if (out.tensor.numel() == 0) return;
  const int64_t k = weights ? weights->size(1) : 1;
  const Tensor index = sorted_indices.to(at::kLong).view({-1, k});
  const Tensor rows = permuted.to(at::kFloat);
  Tensor sum = at::zeros(out.tensor.sizes(), at::kFloat);
  for (int64_t i = 0; i < k; ++i) {
    const Tensor which = index.select(1, i);
    const Tensor dropped = which.ge(rows.size(0));  // numOutTokens left it out
    Tensor part =
        rows.index_select(0, which.masked_fill(dropped, 0)).masked_fill(dropped.unsqueeze(-1), 0);
    if (weights) part = part * weights->select(1, i).to(at::kFloat).unsqueeze(-1);
    sum = sum + part;
  }
  store(out, sum);
}

VNPU_OPERATOR(MoeTokenPermuteWithRoutingMap,
              (const Tensor& tokens, const Tensor& routing_map, const OptionalTensor& weights,
               int64_t out_tokens, bool drop_and_pad, Out permuted, OptionalOut weights_out,
               Out sorted_indices),
              {.tier = kT2, .cost = cost_of_moe_token_permute}) {
  if (permuted.tensor.numel() == 0) return;
  const int64_t count = routing_map.size(0);
  const int64_t experts = routing_map.size(1);
  const Tensor map = routing_map.to(at::kBool).t().contiguous();  // [experts, tokens]
  if (drop_and_pad) {
    const int64_t capacity = out_tokens / experts;
    const Tensor chosen =  // per expert the tokens routed to it first, then others as padding
        at::argsort(map.to(at::kByte), /*stable=*/true, -1, /*descending=*/true)
            .narrow(1, 0, capacity);
    store(sorted_indices, chosen.reshape({-1}));
    store(permuted, tokens.index_select(0, chosen.reshape({-1})));
    if (weights && weights_out) store(weights_out, weights->t().gather(1, chosen).reshape({-1}));
    return;
  }
  const Tensor of_token =
      at::arange(count, at::kLong).expand({experts, count}).masked_select(map);  // expert by expert
  if (of_token.size(0) != permuted.tensor.size(0)) {
    refuse("routingMap routes " + std::to_string(of_token.size(0)) + " times, numOutTokens is " +
           std::to_string(out_tokens) + ".");
  }
  store(sorted_indices, at::argsort(of_token, /*stable=*/true, 0, /*descending=*/false));
  store(permuted, tokens.index_select(0, of_token));
  if (weights && weights_out) store(weights_out, weights->t().masked_select(map));
}

VNPU_OPERATOR(MoeReRouting,
              (const Tensor& tokens, const Tensor& counts, const OptionalTensor& scales,
               int64_t count_form, int64_t index_type, Out tokens_out, OptionalOut scales_out,
               Out index_out, Out counts_out),
              {.tier = kT2, .cost = elements<1>, .allowed = allowed_moe_re_routing}) {
  // counts [ranks, experts]: tokens lie rank by rank, within a rank expert by expert; they shall
  // lie expert by expert, within an expert rank by rank.
  const Tensor sizes = counts.to(at::kLong).contiguous();
  const Tensor per_expert = sizes.sum(0);
  store(counts_out, count_form == 0 ? per_expert.cumsum(0) : per_expert);
  if (tokens.numel() == 0) return;
  const Tensor experts = at::arange(sizes.size(1), at::kLong).repeat({sizes.size(0)});
  const Tensor of_token = at::repeat_interleave(experts, sizes.reshape({-1}));
  if (of_token.size(0) != tokens.size(0)) {
    refuse("expertTokenNumPerRank sums to " + std::to_string(of_token.size(0)) + ", there are " +
           std::to_string(tokens.size(0)) + " tokens.");
  }
  const Tensor source = sort_assignments(of_token).assignments;
  store(tokens_out, tokens.index_select(0, source));
  store(index_out, index_type == 0 ? source : positions(source));
  if (scales && scales_out) store(scales_out, scales->index_select(0, source));
}

}  // namespace vnpu::ops
