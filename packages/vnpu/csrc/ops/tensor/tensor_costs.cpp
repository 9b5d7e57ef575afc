// Costs of moving, choosing and sorting elements.

#include "ops/tensor/declarations.h"

namespace vnpu::ops {
namespace {

using timing::Work;

}  // namespace

// Of what they take from, only what they take is read.
void cost_of_index(const Call& call, Work& work) {
  const int64_t bytes = bytes_of(call.tensor("out"));
  int64_t indices = 0;
  for (const char* name : {"indices", "index", "mask"}) {
    for (const TensorView* view : call.tensors(name)) indices += bytes_of(*view);
  }
  work.read_bytes = bytes + indices;
  work.written_bytes = bytes;
  work.vector_operations = call.tensor("out").numel();
}

namespace {

// Of what they write into, only what they write is touched.
void write_into(Work& work, const TensorView& values) {
  work.read_bytes = bytes_of(values);
  work.written_bytes = bytes_of(values);
  work.vector_operations = values.numel();
}
}  // namespace

void cost_of_index_put_impl(const Call& call, Work& work) {
  write_into(work, call.tensor("values"));
}

void cost_of_inplace_scatter(const Call& call, Work& work) { write_into(work, call.tensor("src")); }

void cost_of_inplace_index_copy(const Call& call, Work& work) {
  write_into(work, call.tensor("source"));
}

void cost_of_inplace_scatter_update(const Call& call, Work& work) {
  write_into(work, call.tensor("updates"));
}

}  // namespace vnpu::ops
