// Sorts tokens by their experts. The inverse is in finalize_routing.cpp.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/moe/assignments.h"
#include "ops/operator.h"
#include "ops/quantization/int8_quantization.h"

namespace vnpu::ops {
namespace {

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

// True if nothing is dropped, padded, quantized or converted, as in a model's decode steps.
bool is_plain(const InitRouting& call, const InitRoutingOut& out) {
  return !call.drop_and_pad && call.quant_mode == kUnquantized && !call.scale &&
         !call.rows_by_position && call.x.dim() == 2 && call.x.is_contiguous() &&
         out.x.is_contiguous() && out.x.scalar_type() == call.x.scalar_type() &&
         call.expert_index.scalar_type() == at::kInt && call.expert_index.is_contiguous() &&
         out.row_index.scalar_type() == at::kInt && out.row_index.is_contiguous();
}

// init_routing of a plain call, in one pass. Returns the number of assignments of each expert.
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

// The form of the assignments' number per expert: 0 nothing, 1 the ends (cumulative), 2 the counts.
void store_counts(const Tensor& experts, int64_t count, int64_t form, const OptionalOut& out) {
  if (form == 0 || !out || out.tensor->numel() == 0) return;
  const Tensor counts = count_experts(experts, 0, count);
  store(out, form == 1 ? counts.cumsum(0) : counts);
}

}  // namespace

static void spread(const Call& call, Work& work, const char* out) {
  const int64_t written = routed_bytes(call.tensor(out));
  work.read_bytes = written + bytes_of(call.tensor("expert_index"));
  work.written_bytes = written;
  work.vector_operations = 32 * call.tensor("expert_index").numel();  // the sort
}
static void cost_of_moe_init_routing(const Call& call, Work& work) { spread(call, work, "x_out"); }

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

constexpr char kInitTiling[] = "moe_init_routing_v3_tiling.cpp";
static Rules rules_of_moe_init_routing_v3() {
  return {"aclnnMoeInitRoutingV3.md, parameters",
          {{"x", {dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kChar}), dims(2, 2)}},
           {"expert_index", {dtype({at::kInt}), dims(2, 2), same_size(0, "x", 0)}},
           {"active_rows",
            that("be the number of assignments, or -1 for all", {"expert_index"},
                 [](const RuleArguments& own) {
                   const int64_t rows = own.tensor(1).numel();
                   return own.integer() == rows || own.integer() == -1;
                 }),
            kInitTiling,
            {.until = CannRelease::k8_5, .tiling = true}},
           {"drop_pad_mode", one_of(0), kInitTiling, {.until = CannRelease::k8_3, .tiling = true}},
           {"drop_pad_mode, row_index_type", one_of(0, 1)},
           {"count_form", one_of(1, 2), kInitTiling, {.until = CannRelease::k8_3, .tiling = true}},
           {"count_form", one_of(0, 1, 2)},
           {"wants_counts", one_of(1), kInitTiling, {.until = CannRelease::k8_5, .tiling = true}},
           {"quant_mode", one_of(-1, 1), kInitTiling, {.until = CannRelease::k8_3, .tiling = true}},
           {"quant_mode", one_of(-1, 0, 1)},
           {"active_range",
            that("be two numbers, from 0 to expertNum, the first below the second", {"experts"},
                 [](const RuleArguments& own) {
                   const std::vector<int64_t>& range = own.integers();
                   return range.size() == 2 && range[0] >= 0 && range[0] < range[1] &&
                          range[1] <= own.integer(1);
                 })},
           {"active_range",
            that("end at 10240 or before", {},
                 [](const RuleArguments& own) {
                   return own.integers().size() != 2 || own.integers()[1] <= 10240;
                 }),
            kInitTiling,
            {.tiling = true}},
           {"scale",
            {dtype({at::kFloat}),
             fits("be [experts of the range, H]", {"x", "active_range", "quant_mode"},
                  [](const RuleArguments& own) {
                    const TensorView& scale = own.tensor();
                    const std::vector<int64_t>& range = own.integers(2);
                    if (own.integer(3) != 1 || range.size() != 2) return true;
                    const bool rows =
                        size_of(scale, 0) == range[1] - range[0] || size_of(scale, 0) == 1;
                    return scale.dims == 2 && rows &&
                           size_of(scale, 1) == size_of(own.tensor(1), 1);
                  })}},
           {"counts_out", dtype({at::kLong})},
           {"row_index_out", dtype({at::kInt})}},
          {.bytes = 32 * kMiB, .copies = true},
          kBigChips};
}
VNPU_OPERATOR(MoeInitRoutingV3,
              (const Tensor& x, const Tensor& expert_index, const OptionalTensor& scale,
               const OptionalTensor& offset, int64_t active_rows, int64_t capacity, int64_t experts,
               int64_t drop_pad_mode, int64_t count_form, bool wants_counts, int64_t quant_mode,
               const IntArray& active_range, int64_t row_index_type, Out x_out, Out row_index_out,
               OptionalOut counts_out, OptionalOut scale_out),
              {.tier = kT2,
               .cost = cost_of_moe_init_routing,
               .rules = rules_of_moe_init_routing_v3()}) {
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

}  // namespace vnpu::ops
