// Gather and scatter: advanced indexing, selection along a dimension, masked writes. Positions may
// be int32 or int64; ATen's own checks refuse what lies outside.

#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

Tensor as_long(const Tensor& index) { return index.to(at::kLong); }

// torch_npu sends ':' as an empty tensor of the indexed tensor's dtype. A real index can be empty
// too, but then nothing is selected, and the caller has returned before it gets here.
c10::List<std::optional<Tensor>> index_list(const TensorList& indices) {
  c10::List<std::optional<Tensor>> list;
  list.reserve(indices.size());
  for (const Tensor& index : indices) {
    const bool whole = index.dim() == 1 && index.numel() == 0;
    list.push_back(whole ? std::nullopt : std::optional<Tensor>(as_long(index)));
  }
  return list;
}

// True if a write through these indices changes nothing, because a real index is empty.
bool selects_nothing(const Tensor& self, const TensorList& indices) {
  bool all_empty = true;
  for (const Tensor& index : indices) {
    if (index.numel() != 0) {
      all_empty = false;
    } else if (index.dim() != 1 || index.scalar_type() != self.scalar_type()) {
      return true;
    }
  }
  return all_empty;
}

Tensor scattered(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src,
                 int64_t reduce) {
  switch (reduce) {
    case 0: return at::scatter(self, dim, as_long(index), src);
    case 1: return at::scatter(self, dim, as_long(index), src, "add");
    case 2: return at::scatter(self, dim, as_long(index), src, "multiply");
    default:
      refuse("reduce is " + std::to_string(reduce) + "; 0 (none), 1 (add) and 2 (multiply) exist");
  }
}

Tensor scattered(const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value,
                 int64_t reduce) {
  switch (reduce) {
    case 0: return at::scatter(self, dim, as_long(index), value);
    case 1: return at::scatter(self, dim, as_long(index), value, "add");
    case 2: return at::scatter(self, dim, as_long(index), value, "multiply");
    default:
      refuse("reduce is " + std::to_string(reduce) + "; 0 (none), 1 (add) and 2 (multiply) exist");
  }
}

}  // namespace

// A dimension that is not indexed has an index of no elements, whose dtype does not matter.
static Check indices_that_are_given(std::vector<ScalarType> allowed) {
  Check check = dtype(std::move(allowed));
  check.find = [find = std::move(check.find)](const RuleArguments& own) -> Found {
    const ViewSpan& all = own[0].tensors;
    for (size_t i = 0; i < all.count; ++i) {
      if (all[i].numel() == 0) continue;
      const ArgumentValue one{.kind = ArgumentValue::Kind::kTensor, .tensor = &all[i]};
      const int first = 0;
      if (Found found = find(RuleArguments(&one, &first))) return found;
    }
    return std::nullopt;
  };
  check.form.clear();  // dtypes of empty ones do not count
  return check;
}
// Only the selected elements of the source are read.
static void cost_of_index(const Call& call, Work& work) {
  const int64_t bytes = bytes_of(call.tensor("out"));
  int64_t indices = 0;
  for (const char* name : {"indices", "index", "mask"}) {
    for (const TensorView* view : call.tensors(name)) indices += bytes_of(*view);
  }
  work.read_bytes = bytes + indices;
  work.written_bytes = bytes;
  work.vector_operations = call.tensor("out").numel();
}
// --- by position ---------------------------------------------------------------------------------
VNPU_OPERATOR(Index, (const Tensor& self, const TensorList& indices, Out out),
              {.cost = cost_of_index,
               .rules = {"CheckDtypeValid in aclnn_index.cpp",
                         {{"self", dtype(kRealAndBool), kOnBigChips},
                          {"indices", indices_that_are_given({at::kInt, at::kLong, at::kBool})},
                          {"out", same_dtype("self")}}}}) {
  if (out.tensor.numel() == 0) return;
  store(out, at::index(self, index_list(indices)));
}

// Only the written elements of the target are touched.
static void write_into(Work& work, const TensorView& values) {
  write_part(work, bytes_of(values), values.numel());
}
static void cost_of_index_put_impl(const Call& call, Work& work) {
  write_into(work, call.tensor("values"));
}
VNPU_OPERATOR(IndexPutImpl,
              (InOut self, const TensorList& indices, const Tensor& values, bool accumulate,
               bool unsafe),
              {.cost = cost_of_index_put_impl,
               .rules = {"CheckDtypeValid in aclnn_index_put_impl.cpp",
                         {{"self", dtype(kRealAndBool), kOnBigChips},
                          {"indices", indices_that_are_given({at::kInt, at::kLong, at::kBool})},
                          {"values", same_dtype("self")}}}}) {
  if (selects_nothing(self.tensor, indices)) return;
  at::_index_put_impl_(self.tensor, index_list(indices), values.to(self.tensor.scalar_type()),
                       accumulate, unsafe);
}
VNPU_OPERATOR(IndexSelect, (const Tensor& self, int64_t dim, const Tensor& index, Out out),
              {.cost = cost_of_index,
               .rules = {"CheckDtypeValid in aclnn_index_select.cpp",
                         {{"index", dtype(kIndices)}, {"out", same_dtype("self")}}}}) {
  if (out.tensor.scalar_type() == self.scalar_type() && self.dim() > 0) {
    at::index_select_out(out.tensor, self, dim, index.reshape(-1));
  } else {
    store(out, at::index_select(self, dim, index.reshape(-1)));
  }
}
VNPU_OPERATOR(Embedding, (const Tensor& weight, const Tensor& indices, Out out),
              {.cost = cost_of_index,
               .rules = {"ops-nn index/embedding/docs/aclnnEmbedding.md, parameters",
                         {{"weight", dims(2, 2)},
                          {"indices", dtype({at::kInt, at::kLong})},
                          {"out", same_dtype("weight")}}}}) {
  if (out.tensor.numel() == 0) return;
  if (out.tensor.is_contiguous() && out.tensor.scalar_type() == weight.scalar_type()) {
    Tensor rows = out.tensor.view({indices.numel(), weight.size(1)});
    at::index_select_out(rows, weight, 0, indices.reshape(-1));
  } else {
    store(out, at::embedding(weight, indices));
  }
}
VNPU_OPERATOR(Gather, (const Tensor& self, int64_t dim, const Tensor& index, Out out),
              {.cost = cost_of_index,
               .rules = {"CheckDtypeValid, CheckShape in aclnn_gather.cpp",
                         {{"self", dtype(kAnyReal), kOnBigChips},
                          {"index", dtype(kIndices)},
                          {"out", {same_dtype("self"), same_sizes("index")}}}}}) {
  if (out.tensor.scalar_type() == self.scalar_type()) {
    at::gather_out(out.tensor, self, dim, as_long(index));
  } else {
    store(out, at::gather(self, dim, as_long(index)));
  }
}
VNPU_OPERATOR(Take, (const Tensor& self, const Tensor& index, Out out), {.cost = cost_of_index}) {
  store(out, at::take(self, as_long(index)));
}

constexpr char kScatter[] = "CheckDtypeValid in aclnn_scatter.cpp";
static Rules rules_of_scatter() {
  return {kScatter,
          {{"self", dtype(kNumbers), kOnBigChips},
           {"index", dtype(kIndices)},
           {"src", same_dtype("self")},
           {"out", {same_dtype("self"), same_sizes("self")}}}};
}
// --- writes by position
// ----------------------------------------------------------------------------
VNPU_OPERATOR(Scatter,
              (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src,
               int64_t reduce, Out out),
              {.cost = elements<1>, .rules = rules_of_scatter()}) {
  store(out, scattered(self, dim, index, src, reduce));
}
VNPU_OPERATOR(ScatterValue,
              (const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value,
               int64_t reduce, Out out),
              {.cost = elements<1>,
               .rules = {kScatter,
                         {{"self", dtype(kNumbers), kOnBigChips},
                          {"index", dtype(kIndices)},
                          {"out", {same_dtype("self"), same_sizes("self")}}}}}) {
  store(out, scattered(self, dim, index, value, reduce));
}

static void cost_of_inplace_scatter(const Call& call, Work& work) {
  write_into(work, call.tensor("src"));
}
VNPU_OPERATOR(InplaceScatter,
              (InOut self, int64_t dim, const Tensor& index, const Tensor& src, int64_t reduce),
              {.cost = cost_of_inplace_scatter,
               .rules = {kScatter,
                         {{"self", dtype(kNumbers), kOnBigChips},
                          {"index", dtype(kIndices)},
                          {"src", same_dtype("self")}}}}) {
  store(self, scattered(self.tensor, dim, index, src, reduce));
}
VNPU_OPERATOR(InplaceScatterValue,
              (InOut self, int64_t dim, const Tensor& index, const Scalar& value, int64_t reduce),
              {.cost = elements<1>}) {
  store(self, scattered(self.tensor, dim, index, value, reduce));
}
VNPU_OPERATOR(ScatterAdd,
              (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& src, Out out),
              {.cost = elements<1>, .rules = rules_of_scatter()}) {
  store(out, at::scatter_add(self, dim, as_long(index), src));
}
VNPU_OPERATOR(IndexAdd,
              (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source,
               const Scalar& alpha, Out out),
              {.cost = elements<1>,
               .rules = {"aclnnIndexAdd.md, parameters and status codes",
                         {{"self", dtype(kRealAndBool), kOnBigChips},
                          {"index", {dtype(kIndices), dims(0, 1)}},
                          {"source", same_dtype("self")},
                          {"out", {same_dtype("self"), same_sizes("self")}}}}}) {
  store(out, at::index_add(self, dim, as_long(index), source, alpha));
}

static void cost_of_inplace_index_copy(const Call& call, Work& work) {
  write_into(work, call.tensor("source"));
}
VNPU_OPERATOR(InplaceIndexCopy,
              (InOut self, int64_t dim, const Tensor& index, const Tensor& source),
              {.cost = cost_of_inplace_index_copy,
               .rules = {"aclnn_index_copy.cpp: CheckDtypeValid, CheckShape, CheckElementNum",
                         {{"self", dtype(kNumbers), kOnBigChips},
                          {"self", dims(0, 8)},
                          {"index", {dtype(kIndices), dims(0, 1)}},
                          {"source", same_dtype("self")}}}}) {
  self.tensor.index_copy_(dim, as_long(index), source);
}
VNPU_OPERATOR(InplaceIndexFillTensor,
              (InOut self, int64_t dim, const IntArray& index, const Scalar& value),
              {.cost = elements<1>}) {
  self.tensor.index_fill_(dim, at::tensor(index, at::kLong), value);
}
VNPU_OPERATOR(InplaceIndexFill, (InOut self, int64_t dim, const Tensor& index, const Scalar& value),
              {.cost = elements<1>,
               .rules = {
                   "aclnn_index_fill.cpp: DTYPE_910B_SUPPORT_LIST, CheckIndexDtypeValid",
                   {{"self",
                     dtype({at::kInt, at::kHalf, at::kFloat, at::kLong, at::kBool, at::kBFloat16}),
                     kOnBigChips},
                    {"index", dtype(kIndices)}}}}) {
  self.tensor.index_fill_(dim, as_long(index), value);
}
VNPU_OPERATOR(IndexCopy,
              (const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, Out out),
              {.tier = kOther, .cost = elements<1>}) {
  store(out, at::index_copy(self, dim, as_long(index), source));
}
VNPU_OPERATOR(IndexFillTensor,
              (const Tensor& self, int64_t dim, const IntArray& index, const Scalar& value,
               Out out),
              {.tier = kOther, .cost = elements<1>}) {
  store(out, at::index_fill(self, dim, at::tensor(index, at::kLong), value));
}
VNPU_OPERATOR(IndexFill,
              (const Tensor& self, int64_t dim, const Tensor& index, const Scalar& value, Out out),
              {.tier = kOther, .cost = elements<1>}) {
  store(out, at::index_fill(self, dim, as_long(index), value));
}
VNPU_OPERATOR(InplaceFillDiagonal, (InOut self, const Scalar& value, bool wrap),
              {.tier = kOther, .cost = elements<1>}) {
  self.tensor.fill_diagonal_(value, wrap);
}
VNPU_OPERATOR(InplacePut, (InOut self, const Tensor& index, const Tensor& source, bool accumulate),
              {.cost = cost_of_inplace_index_copy}) {
  self.tensor.put_(as_long(index), source, accumulate);
}

static void cost_of_inplace_scatter_update(const Call& call, Work& work) {
  write_into(work, call.tensor("updates"));
}
// `updates` holds, for each batch entry, the slice that goes to position indices[entry] of `axis`.
VNPU_OPERATOR(InplaceScatterUpdate,
              (InOut data, const Tensor& indices, const Tensor& updates, int64_t axis),
              {.cost = cost_of_inplace_scatter_update}) {
  Tensor target = data.tensor;
  require(target.dim() == updates.dim(),
          "data and updates must have the same number of dimensions");
  if (axis < 0) axis += target.dim();
  require(axis > 0 && axis < target.dim(), "axis must not be the batch dimension");
  const Tensor starts = as_long(indices).contiguous();
  require(starts.dim() == 1 || starts.dim() == 2, "indices must have 1 or 2 dimensions");
  if (starts.dim() == 1) {
    require(starts.size(0) == updates.size(0), "one index for each batch entry is needed");
    const int64_t* start = starts.const_data_ptr<int64_t>();
    for (int64_t entry = 0; entry < updates.size(0); ++entry) {
      target[entry].narrow(axis - 1, start[entry], updates.size(axis)).copy_(updates[entry]);
    }
  } else {  // rows of (batch entry, position)
    require(starts.size(1) == 2, "2-dimensional indices must hold pairs (batch entry, position)");
    const int64_t* pair = starts.const_data_ptr<int64_t>();
    for (int64_t entry = 0; entry < updates.size(0); ++entry, pair += 2) {
      target[pair[0]].narrow(axis - 1, pair[1], updates.size(axis)).copy_(updates[entry]);
    }
  }
}

// --- by mask
// ---------------------------------------------------------------------------------------
VNPU_OPERATOR(InplaceMaskedFillScalar, (InOut self, const Tensor& mask, const Scalar& value),
              {.cost = elements<1>,
               .rules = {"DTYPE_SUPPORT_LIST in aclnn_masked_fill_scalar.cpp",
                         {{"self",
                           dtype({at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kLong,
                                  at::kChar, at::kBool}),
                           kOnBigChips},
                          {"mask", dtype({at::kBool})}}}}) {
  self.tensor.masked_fill_(mask.to(at::kBool), value);
}
VNPU_OPERATOR(InplaceMaskedFillTensor, (InOut self, const Tensor& mask, const Tensor& value),
              {.cost = elements<1>}) {
  self.tensor.masked_fill_(mask.to(at::kBool), value.reshape({}));
}
VNPU_OPERATOR(InplaceMaskedScatter, (InOut self, const Tensor& mask, const Tensor& source),
              {.cost = elements<1>}) {
  self.tensor.masked_scatter_(mask.to(at::kBool), source);
}
VNPU_OPERATOR(MaskedSelect, (const Tensor& self, const Tensor& mask, DynamicOut out),
              {.cost = cost_of_index}) {
  out.set(at::masked_select(self, mask.to(at::kBool)));
}
VNPU_OPERATOR(SWhere, (const Tensor& condition, const Tensor& self, const Tensor& other, Out out),
              {.cost = elements<1>,
               .rules = {"CONDITION_DTYPE_SUPPORT in aclnn_s_where.cpp",
                         {{"condition", dtype({at::kBool, at::kByte})}}}}) {
  const ScalarType type = out.tensor.scalar_type();
  store(out, at::where(condition.to(at::kBool), self.to(type), other.to(type)));
}

}  // namespace vnpu::ops
