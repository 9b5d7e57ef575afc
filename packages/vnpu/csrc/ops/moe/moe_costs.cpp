// Costs of routing tokens to experts. Rows are those that routing makes room for; of those that
// this rank's experts do not have, nothing is read or written.

#include "ops/moe/declarations.h"

namespace vnpu::ops {
namespace {

using timing::Work;

}  // namespace

void cost_of_moe_gating_top_k(const Call& call, Work& work) {
  for_each_element(call, work, 16);
  work.wide = true;
}

namespace {

// What the rows take that are there, of the bytes of all. Dimensions before the last count rows.
int64_t live_bytes(const TensorView& rows) {
  const int64_t count = size_at(rows, -1) > 0 ? rows.numel() / size_at(rows, -1) : 0;
  return count > 0 ? bytes_of(rows) / count * routed_rows(count) : 0;
}

void spread(const Call& call, Work& work, const char* out) {
  const int64_t written = live_bytes(call.tensor(out));
  work.read_bytes = written + bytes_of(call.tensor("expert_index"));
  work.written_bytes = written;
  work.vector_operations = 32 * call.tensor("expert_index").numel();  // the sort
}
}  // namespace

void cost_of_moe_init_routing(const Call& call, Work& work) { spread(call, work, "x_out"); }

void cost_of_moe_token_permute(const Call& call, Work& work) {
  const int64_t bytes = bytes_of(call.tensor("permuted"));
  work.read_bytes = bytes;
  work.written_bytes = bytes;
  work.vector_operations = 32 * call.tensor("sorted_indices").numel();
}

void cost_of_moe_finalize_routing(const Call& call, Work& work) {
  const TensorView& rows = call.tensor("rows");
  work.read_bytes = live_bytes(rows);
  work.written_bytes = bytes_of(call.tensor("out"));
  work.vector_operations = 2 * routed_rows(rows.numel());
}

void cost_of_moe_token_unpermute(const Call& call, Work& work) {
  work.read_bytes = bytes_of(call.tensor("permuted"));
  work.written_bytes = bytes_of(call.tensor("out"));
  work.vector_operations = 2 * call.tensor("permuted").numel();
}

// Sends a row per token and chosen expert; the exchange is priced by its bytes, as read_bytes.
void cost_of_moe_distribute_dispatch(const Call& call, Work& work) {
  const int64_t size = call.integer("quant_mode", 0) != 0 ? 1 : 2;
  work.read_bytes = call.tensor("expert_ids").numel() * size_at(call.tensor("x"), -1) * size;
}

void cost_of_moe_distribute_combine(const Call& call, Work& work) {
  work.read_bytes = call.tensor("expert_ids").numel() * size_at(call.tensor("rows"), -1) * 2;
}

}  // namespace vnpu::ops
