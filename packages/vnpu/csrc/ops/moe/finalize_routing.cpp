// Returns the experts' results to the order of the tokens: the weighted sum of each token's rows.

#include <ATen/Parallel.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ops/float_rows.h"
#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

// Inverse of routing: the sum of each token's rows, weighted.
struct FinalizeRouting {
  const Tensor& rows;       // [rows, columns], or [experts, capacity, columns]
  const Tensor& row_index;  // [tokens * k]: the row of each assignment; -1: it was dropped
  OptionalTensor skip1, skip2, bias, scales, expert_index;
  bool column_order;  // assignments are numbered choice by choice instead of token by token
};

// Computes only the weighted sum, for dense tensors and weights (if any) of one dtype. Returns
// false, without a result, for others.
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

static void cost_of_moe_finalize_routing(const Call& call, Work& work) {
  const TensorView& rows = call.tensor("rows");
  work.read_bytes = routed_bytes(rows);
  work.written_bytes = bytes_of(call.tensor("out"));
  work.vector_operations = 2 * routed_rows(rows.numel());
}
VNPU_OPERATOR(MoeFinalizeRouting,
              (const Tensor& rows, const Tensor& skip1, const OptionalTensor& skip2,
               const OptionalTensor& bias, const OptionalTensor& scales, const Tensor& row_index,
               const OptionalTensor& expert_index, Out out),
              {.tier = kT2, .cost = cost_of_moe_finalize_routing}) {
  finalize_routing({rows, row_index, skip1, skip2, bias, scales, expert_index, true}, out);
}

static Rules rules_of_moe_finalize_routing_v2() {
  return {"op-plugin torch_npu-npu_moe_finalize_routing.md, parameters",
          {{"rows", dtype(kFloats)},
           {"rows", dims(2, 2).when(equals("drop_pad_mode", 0, 2))},
           {"rows", dims(3, 3).when(equals("drop_pad_mode", 1, 3))},
           {"drop_pad_mode", one_of(0, 1, 2, 3)},
           {"row_index", {dtype({at::kInt}), dims(1, 1)}},
           {"scales",
            {dims(2, 2), fits("have an entry for each of the row index", {"row_index"},
                              [](const RuleArguments& own) {
                                return own.tensor().numel() == own.tensor(1).numel();
                              })}},
           {"scales",
            that("have the dtype of rows, or be float32 beside bfloat16", {"rows"},
                 [](const RuleArguments& own) {
                   const ScalarType type = own.tensor().dtype;
                   const ScalarType rows = own.tensor(1).dtype;
                   return type == rows || (type == at::kFloat && rows == at::kBFloat16);
                 }),
            "moe_finalize_routing_v2_tiling.cpp"},
           {"skip1, skip2, bias, out", same_dtype("rows")},
           {"skip2", absent().when(is_missing("skip1"))},
           {"expert_index", present().when(is_given("bias"))},
           {"expert_index", dtype({at::kInt})}},
          {.bytes = 16 * kMiB, .copies = true},
          kBigChips};
}
VNPU_OPERATOR(MoeFinalizeRoutingV2,
              (const Tensor& rows, const Tensor& row_index, const OptionalTensor& skip1,
               const OptionalTensor& skip2, const OptionalTensor& bias,
               const OptionalTensor& scales, const OptionalTensor& expert_index,
               int64_t drop_pad_mode, Out out),
              {.tier = kT2,
               .cost = cost_of_moe_finalize_routing,
               .rules = rules_of_moe_finalize_routing_v2()}) {
  // 0 and 2 dropless, 1 and 3 drop-and-pad; 0 and 1 number the assignments choice by choice.
  if (drop_pad_mode < 0 || drop_pad_mode > 3) {
    refuse("dropPadMode " + std::to_string(drop_pad_mode) + " is not known; use 0 to 3.");
  }
  finalize_routing({rows, row_index, skip1, skip2, bias, scales, expert_index, drop_pad_mode < 2},
                   out);
}

}  // namespace vnpu::ops
