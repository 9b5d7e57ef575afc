// Costs of matrix products.

#include <algorithm>
#include <cmath>

#include "ops/matmul/declarations.h"

namespace vnpu::ops {
namespace {

using timing::MatrixProduct;
using timing::Work;

}  // namespace

void cost_of_mm(const Call& call, Work& work) {
  multiply(work, call.tensor("self"), call.tensor("mat2"));
}

// Each row's own slot: as many operations as one pair of matrices, whatever the number of slots.
void cost_of_add_lora(const Call& call, Work& work) {
  work.kind = Work::Class::kMatmul;
  const TensorView& x = call.tensor("x");
  const TensorView& weight_b = call.tensor("weight_b");
  MatrixProduct product;
  product.m = size_at(x, 0);
  product.arithmetic = arithmetic_of(x);
  product.k = size_at(x, 1);
  product.n = size_at(weight_b, 3);
  if (product.n != product.k) work.products.push_back(product);
  product.k = size_at(weight_b, 3);
  product.n = size_at(weight_b, 2);
  work.products.push_back(product);
}

void cost_of_addmm(const Call& call, Work& work) {
  multiply(work, call.tensor("mat1"), call.tensor("mat2"));
}

void cost_of_baddbmm(const Call& call, Work& work) {
  multiply(work, call.tensor("batch1"), call.tensor("batch2"));
}

namespace {

// Rows, columns and depth from what is written and from the left operand.
void multiply_into(Work& work, const TensorView& left, bool is_transposed, const TensorView& out) {
  work.kind = Work::Class::kMatmul;
  MatrixProduct product;
  product.n = size_at(out, -1);
  product.m = product.n > 0 ? out.numel() / product.n : 0;
  product.k = size_at(left, is_transposed ? -2 : -1);
  product.arithmetic = arithmetic_of(left);
  work.products.push_back(product);
}

}  // namespace

void cost_of_quant_matmul_v5(const Call& call, Work& work) {
  multiply_into(work, call.tensor("x1"), call.integer("transpose1", 0) != 0, call.tensor("out"));
  work.vector_operations = 2 * call.tensor("out").numel();
  work.wide = true;
}

void cost_of_weight_quant_batch_matmul_v2(const Call& call, Work& work) {
  multiply_into(work, call.tensor("x"), false, call.tensor("out"));
  work.vector_operations = 2 * call.tensor("weight").numel();
}

// By batch, with operands in any order of dimensions; the right one's first is the batch.
void cost_of_transpose_batch_mat_mul(const Call& call, Work& work) {
  work.kind = Work::Class::kMatmul;
  const TensorView& left = call.tensor("x1");
  const TensorView& right = call.tensor("x2");
  const TensorView& out = call.tensor("out");
  const int64_t batch = size_at(right, 0);
  if (batch == 0 || out.numel() == 0) return;
  MatrixProduct product;
  product.batch = batch;
  // left * right / out = batch * k * k.
  product.k =
      std::llround(std::sqrt(static_cast<double>(left.numel()) / static_cast<double>(out.numel()) *
                             static_cast<double>(right.numel() / batch)));
  product.k = std::max<int64_t>(product.k, 1);
  product.m = left.numel() / batch / product.k;
  product.n = right.numel() / batch / product.k;
  product.arithmetic = arithmetic_of(left);
  work.products.push_back(product);
}

namespace {

// A group of rows for each expert. Routing makes room for more rows than there are.
void multiply_groups(const Call& call, Work& work, const char* out_name, int64_t columns_per_out) {
  work.kind = Work::Class::kMatmul;
  const std::vector<const TensorView*> inputs = call.tensors("x");
  const std::vector<const TensorView*> weights = call.tensors("weight");
  const TensorView& out = call.tensor(out_name);
  int64_t rows = 0;
  for (const TensorView* x : inputs) rows += size_at(*x, -1) > 0 ? x->numel() / size_at(*x, -1) : 0;
  const int64_t groups = weights.size() > 1 ? static_cast<int64_t>(weights.size())
                                            : std::max<int64_t>(size_at(*weights.front(), 0), 1);
  const bool is_routed = call.has("group_list");
  const int64_t live = is_routed ? routed_rows(rows) : rows;
  MatrixProduct product;
  product.batch = std::min(groups, live);
  product.m = (live + groups - 1) / groups;
  product.n = size_at(out, -1) * columns_per_out;
  product.k = size_at(*inputs.front(), -1);
  product.arithmetic = arithmetic_of(*inputs.front());
  work.products.push_back(product);
  int64_t read = live * product.k * static_cast<int64_t>(c10::elementSize(inputs.front()->dtype));
  int64_t weight_bytes = 0;
  for (const TensorView* weight : weights) weight_bytes += bytes_of(*weight);
  // Of experts without a row nothing is read. Rows are spread evenly.
  read += weight_bytes / groups * std::min(groups, live);
  work.read_bytes = read;
  work.written_bytes = live * size_at(out, -1) * static_cast<int64_t>(c10::elementSize(out.dtype));
  work.vector_operations = live * product.n * (columns_per_out > 1 ? 10 : 2);
  work.wide = true;
}

}  // namespace

void cost_of_grouped_matmul_v4(const Call& call, Work& work) {
  multiply_groups(call, work, "out", 1);
}

void cost_of_grouped_matmul_swiglu_quant_v2(const Call& call, Work& work) {
  multiply_groups(call, work, "out", 2);
}

void cost_of_grouped_matmul_finalize_routing_v2(const Call& call, Work& work) {
  multiply_groups(call, work, "out", 1);
}

void cost_of_npu_format_cast(const Call&, Work&) {}

}  // namespace vnpu::ops
