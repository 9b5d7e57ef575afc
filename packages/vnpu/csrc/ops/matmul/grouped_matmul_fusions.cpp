// Products of groups of integer rows, fused with what follows them in a layer of experts: the
// activation and the next quantization, or the way back into the order of the tokens.

#include "ops/matmul/integer_matrices.h"
#include "ops/matmul/row_groups.h"
#include "ops/quantization/int8_quantization.h"

namespace vnpu::ops {
namespace {

// x [rows, k], int8 or packed 4-bit integers, times the weights of the groups, as floats: scaled
// per column and per row.
Tensor scaled_products(const Tensor& rows, const std::vector<Tensor>& weights,
                       const std::vector<Tensor>& scales, const OptionalTensor& bias,
                       const OptionalTensor& row_scale, const std::vector<Group>& groups) {
  const int64_t columns = scales.front().size(-1);
  const Tensor x = rows.scalar_type() == at::kInt ? unpack_int4(rows) : rows;
  Tensor result = at::zeros({x.size(0), columns}, at::kFloat);
  for (const Group& group : groups) {
    if (group.count == 0) continue;
    const Tensor weight = integer_matrix(of_group(weights, group.index, 2), x.size(-1));
    Tensor sum = multiply_integers(x.narrow(0, group.start, group.count), weight);
    const Tensor scale = of_group(scales, group.index, 1);
    const bool integer_bias = bias && bias->scalar_type() == at::kInt;
    if (integer_bias) sum = sum + of_group({*bias}, group.index, 1);
    Tensor values = sum.to(at::kFloat) * float_scales(scale.reshape({-1}));
    if (row_scale) {
      values =
          values *
          row_scale->to(at::kFloat).reshape({-1}).narrow(0, group.start, group.count).unsqueeze(-1);
    }
    if (bias && !integer_bias) values = values + of_group({*bias}, group.index, 1).to(at::kFloat);
    result.narrow(0, group.start, group.count).copy_(values);
  }
  return result;
}

// silu(first half) * second half of the products, as int8 with a scale per row.
// smooth: factors of the groups, [groups] or [groups, columns]
void swiglu_quantized(const Tensor& products, const OptionalTensor& smooth,
                      const std::vector<Group>& groups, const Out& out, const Out& scale_out) {
  if (out.tensor.numel() == 0) return;
  const auto halves = products.chunk(2, -1);
  Tensor gated = at::silu(halves[0]) * halves[1];
  if (smooth) {
    for (const Group& group : groups) {
      gated.narrow(0, group.start, group.count)
          .mul_(of_group({*smooth}, group.index, 0).to(at::kFloat));
    }
  }
  const auto [values, scales] = quantize_rows(gated);
  store(out, values);
  store(scale_out, scales.reshape(scale_out.tensor.sizes()));
}

struct FinalizeRouting {
  const Tensor& x;
  const LaidOut& weight;
  OptionalTensor scale, bias, row_scale, group_list, shared_input, weights_of_rows, row_index;
  double shared_weight;
  int64_t shared_offset;
  bool transpose1, transpose2;
  int64_t group_list_form;
};

// The products, weighted, summed into the token of each row, on top of a part that all experts
// share.
void finalize_routing(const FinalizeRouting& call, const Out& out) {
  require(call.group_list && call.row_index && call.scale,
          "groupList, rowIndex and scale are required.");
  const Tensor x = call.transpose1 ? call.x.t() : call.x;
  const Tensor matrix = dense_weight(call.weight);
  const Tensor weight = call.transpose2 ? matrix.transpose(-1, -2) : matrix;
  const std::vector<Group> groups =
      row_groups(*call.group_list, static_cast<GroupListForm>(call.group_list_form), x.size(0));
  Tensor rows = scaled_products(x, {weight}, {*call.scale}, call.bias, call.row_scale, groups);
  if (call.weights_of_rows) rows = rows * call.weights_of_rows->to(at::kFloat).reshape({-1, 1});
  Tensor sum = at::zeros(out.tensor.sizes(), at::kFloat);
  if (call.shared_input) {
    sum.narrow(0, call.shared_offset, call.shared_input->size(0))
        .copy_(call.shared_input->to(at::kFloat) * call.shared_weight);
  }
  int64_t routed = 0;
  for (const Group& group : groups) routed = std::max(routed, group.start + group.count);
  sum.index_add_(0, call.row_index->to(at::kLong).narrow(0, 0, routed), rows.narrow(0, 0, routed));
  store(out, sum);
}

}  // namespace

static void cost_of_grouped_matmul_swiglu_quant_v2(const Call& call, Work& work) {
  multiply_groups(call, work, "out", 2);
}
VNPU_OPERATOR(GroupedMatmulSwigluQuantWeightNZ,
              (const Tensor& x, const LaidOut& weight, const OptionalTensor& bias,
               const OptionalTensor&, const Tensor& weight_scale, const Tensor& x_scale,
               const Tensor& group_list, Out out, Out scale_out, OptionalOut),
              {.tier = kT2, .cost = cost_of_grouped_matmul_swiglu_quant_v2}) {
  const std::vector<Group> groups = row_groups(group_list, GroupListForm::kEnds, x.size(0));
  const Tensor products =
      scaled_products(x, {dense_weight(weight)}, {weight_scale}, bias, x_scale, groups);
  swiglu_quantized(products, {}, groups, out, scale_out);
}

#define VNPU_GROUPED_SWIGLU_QUANT(NAME, ...)                                                   \
  VNPU_OPERATOR(                                                                               \
      NAME,                                                                                    \
      (const Tensor& x, const LaidOutList& weight, const TensorList& weight_scale,             \
       const OptionalTensorList&, const OptionalTensor& bias, const Tensor& x_scale,           \
       const OptionalTensor& smooth, const Tensor& group_list, int64_t, int64_t, int64_t,      \
       int64_t group_list_form, const OptionalIntArray&, Out out, Out scale_out),              \
      __VA_ARGS__) {                                                                           \
    std::vector<Tensor> weights;                                                               \
    for (const LaidOut& one : weight) weights.push_back(dense_weight(one));                    \
    const std::vector<Group> groups =                                                          \
        row_groups(group_list, static_cast<GroupListForm>(group_list_form), x.size(0));        \
    swiglu_quantized(scaled_products(x, weights, weight_scale, bias, x_scale, groups), smooth, \
                     groups, out, scale_out);                                                  \
  }
VNPU_GROUPED_SWIGLU_QUANT(GroupedMatmulSwigluQuantV2,
                          {.tier = kT2, .cost = cost_of_grouped_matmul_swiglu_quant_v2})
VNPU_GROUPED_SWIGLU_QUANT(GroupedMatmulSwigluQuantWeightNzV2,
                          {.tier = kT2, .cost = cost_of_grouped_matmul_swiglu_quant_v2})

#define VNPU_FINALIZE_INPUTS                                                                       \
  const Tensor &x, const LaidOut &weight, const OptionalTensor &scale, const OptionalTensor &bias, \
      const OptionalTensor &, const OptionalTensor &, const OptionalTensor &,                      \
      const OptionalTensor &row_scale, const OptionalTensor &group_list,                           \
      const OptionalTensor &shared_input, const OptionalTensor &weights_of_rows,                   \
      const OptionalTensor &row_index, int64_t, float shared_weight, int64_t shared_offset,        \
      bool transpose1, bool transpose2, int64_t group_list_form
#define VNPU_FINALIZE_CALL                                                                      \
  finalize_routing(                                                                             \
      {x, weight, scale, bias, row_scale, group_list, shared_input, weights_of_rows, row_index, \
       shared_weight, shared_offset, transpose1, transpose2, group_list_form},                  \
      out)

static void cost_of_grouped_matmul_finalize_routing_v2(const Call& call, Work& work) {
  multiply_groups(call, work, "out", 1);
}
VNPU_OPERATOR(GroupedMatmulFinalizeRoutingV2, (VNPU_FINALIZE_INPUTS, Out out),
              {.tier = kT2, .cost = cost_of_grouped_matmul_finalize_routing_v2}) {
  VNPU_FINALIZE_CALL;
}
VNPU_OPERATOR(GroupedMatmulFinalizeRoutingV3,
              (VNPU_FINALIZE_INPUTS, const OptionalIntArray&, Out out),
              {.tier = kT2, .cost = cost_of_grouped_matmul_finalize_routing_v2}) {
  VNPU_FINALIZE_CALL;
}
VNPU_OPERATOR(GroupedMatmulFinalizeRoutingWeightNzV2,
              (VNPU_FINALIZE_INPUTS, const OptionalIntArray&, Out out),
              {.tier = kT2, .cost = cost_of_grouped_matmul_finalize_routing_v2}) {
  VNPU_FINALIZE_CALL;
}
VNPU_OPERATOR(GroupedMatmulFinalizeRoutingWeightNz,
              (const Tensor& x, const LaidOut& weight, const OptionalTensor& scale,
               const OptionalTensor& bias, const OptionalTensor& row_scale,
               const OptionalTensor& group_list, const OptionalTensor& shared_input,
               const OptionalTensor& weights_of_rows, const OptionalTensor& row_index, int64_t,
               float shared_weight, int64_t shared_offset, bool transpose1, bool transpose2,
               int64_t group_list_form, Out out),
              {.tier = kT2, .cost = cost_of_grouped_matmul_finalize_routing_v2}) {
  VNPU_FINALIZE_CALL;
}

}  // namespace vnpu::ops
