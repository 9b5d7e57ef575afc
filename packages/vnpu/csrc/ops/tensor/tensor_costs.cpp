// Costs of moving, choosing and sorting elements.

#include "ops/costs.h"

namespace vnpu::ops {
namespace {

using timing::Work;

// Of what they take from, only what they take is read.
const bool gathers = price("cost: Index IndexSelect Embedding Gather Take MaskedSelect",
                           [](const Call& call, Work& work) {
                             const int64_t bytes = bytes_of(call.tensor("out"));
                             int64_t indices = 0;
                             for (const char* name : {"indices", "index", "mask"}) {
                               for (const TensorView* view : call.tensors(name))
                                 indices += bytes_of(*view);
                             }
                             work.read_bytes = bytes + indices;
                             work.written_bytes = bytes;
                             work.vector_operations = call.tensor("out").numel();
                           });

// Of what they write into, only what they write is touched.
void write_into(Work& work, const TensorView& values) {
  work.read_bytes = bytes_of(values);
  work.written_bytes = bytes_of(values);
  work.vector_operations = values.numel();
}
const bool writes_values = price("cost: IndexPutImpl", [](const Call& call, Work& work) {
  write_into(work, call.tensor("values"));
});
const bool writes_src = price("cost: InplaceScatter", [](const Call& call, Work& work) {
  write_into(work, call.tensor("src"));
});
const bool writes_source =
    price("cost: InplaceIndexCopy InplacePut",
          [](const Call& call, Work& work) { write_into(work, call.tensor("source")); });
const bool writes_updates = price("cost: InplaceScatterUpdate", [](const Call& call, Work& work) {
  write_into(work, call.tensor("updates"));
});

const bool sorts = price("cost: Sort Topk Kthvalue",
                         [](const Call& call, Work& work) { for_each_element(call, work, 32); });

const bool plain = price(
    "cost: Arange Bucketize Cast Cat ConstantPadNd EmbeddingRenorm Eye Flip Im2col IndexAdd"
    " IndexCopy IndexFill IndexFillTensor InplaceCopy InplaceFillDiagonal InplaceFillScalar"
    " InplaceFillTensor InplaceIndexFill InplaceIndexFillTensor InplaceMaskedFillScalar"
    " InplaceMaskedFillTensor InplaceMaskedScatter InplaceOne InplaceRenorm"
    " InplaceScatterValue InplaceTril InplaceTriu InplaceZero IsInScalarTensor"
    " IsInTensorScalar Linspace Nonzero NonzeroV2 OneHot Range Renorm Repeat RepeatInterleave"
    " RepeatInterleaveInt RepeatInterleaveIntWithDim RepeatInterleaveTensor"
    " RepeatInterleaveWithDim Roll SWhere Scatter ScatterAdd ScatterValue SearchSorted"
    " SearchSorteds SplitWithSize Stack Tril Triu",
    [](const Call& call, Work& work) { for_each_element(call, work, 1); });

// Not on vector cores.
const bool on_ai_cpu =
    price("cost: Unique Unique2 UniqueConsecutive", [](const Call& call, Work& work) {
      for_each_element(call, work, 32);
      work.kind = Work::Class::kAiCpu;
    });

}  // namespace
}  // namespace vnpu::ops
