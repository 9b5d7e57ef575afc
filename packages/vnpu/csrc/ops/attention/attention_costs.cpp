// Cost of the attention operators, with lengths or ends of sequences.

#include <algorithm>

#include "ops/attention/fused_attention.h"

namespace vnpu::ops {

bool has_packed_tokens(std::string_view layout) {
  return layout.starts_with("TND") || layout.starts_with("NTD");
}

int64_t tokens_of(const TensorView& view, std::string_view layout) {
  if (layout.starts_with("BNSD")) return size_of(view, 2);
  if (layout.starts_with("SBH")) return size_of(view, 0);
  if (has_packed_tokens(layout)) return size_of(view, layout.starts_with("TND") ? 0 : 1);
  return size_of(view, 1);
}

namespace {

// Operations on each score between the two products: scale, mask, maximum, exponential, sum,
// divide.
constexpr int64_t kSoftmaxOperations = 6;

// Lengths of sequences in either form of the operators: one length each, or the ends in one row of
// tokens.
std::vector<int64_t> lengths(const std::vector<int64_t>& values, bool are_ends) {
  std::vector<int64_t> result = values;
  if (are_ends) {
    for (size_t i = result.size(); i-- > 1;) result[i] -= result[i - 1];
  }
  for (int64_t& length : result) length = std::max<int64_t>(length, 0);
  return result;
}

struct Sequences {
  std::vector<int64_t> query;
  std::vector<int64_t> key;
};

int64_t batch_of(const TensorView& view, std::string_view layout) {
  if (has_packed_tokens(layout)) return 1;
  return size_of(view, layout.starts_with("SBH") ? 1 : 0);
}

Sequences sequences_of(const Call& call, const std::vector<int64_t>* query_lengths,
                       const std::vector<int64_t>* key_lengths) {
  const std::string& layout = call.text("layout");
  const TensorView& query = call.tensor("query");
  const bool packed = has_packed_tokens(layout);
  const bool paged = call.has("block_table");
  Sequences found;
  if (query_lengths != nullptr && !query_lengths->empty()) {
    found.query = lengths(*query_lengths, packed);
  } else {
    found.query.assign(static_cast<size_t>(batch_of(query, layout)), tokens_of(query, layout));
  }
  if (key_lengths != nullptr && !key_lengths->empty()) {
    found.key = lengths(*key_lengths, packed && !paged);
  } else if (paged) {
    // As many as the table has room for.
    const int64_t room = size_of(call.tensor("block_table"), 1) *
                         std::max<int64_t>(call.integer("block_size", 128), 1);
    found.key.assign(found.query.size(), room);
  } else {
    found.key.assign(found.query.size(), tokens_of(call.tensor("key"), layout));
  }
  const size_t both = std::max(found.query.size(), found.key.size());
  found.query.resize(both, found.query.empty() ? 0 : found.query.back());
  found.key.resize(both, found.key.empty() ? 0 : found.key.back());
  return found;
}

}  // namespace

void cost_of_attention(const Call& call, Work& work, const std::vector<int64_t>* query_lengths,
                       const std::vector<int64_t>* key_lengths) {
  work.kind = Work::Class::kAttention;
  work.wide = true;
  const TensorView& query = call.tensor("query");
  const TensorView& key = call.tensor("key");
  const TensorView& value = call.tensor("value");
  const TensorView& out = call.tensor("out");
  const int64_t heads = std::max<int64_t>(call.integer("query_heads", 1), 1);
  int64_t key_heads = call.integer("key_heads", 0);
  if (key_heads <= 0) key_heads = heads;
  const std::string& layout = call.text("layout");
  const bool is_flat = layout == "BSH" || layout == "SBH";  // heads lie in the last dimension
  const int64_t query_size = is_flat ? size_of(query, -1) / heads : size_of(query, -1);
  const int64_t rope = call.has("query_rope") ? size_of(call.tensor("query_rope"), -1) : 0;
  const Sequences sequences = sequences_of(call, query_lengths, key_lengths);
  int64_t query_tokens = 0;
  for (const int64_t length : sequences.query) query_tokens += length;
  const int64_t value_size =
      query_tokens > 0
          ? std::max<int64_t>(out.numel() / std::max<int64_t>(query.numel() / query_size, 1), 1)
          : query_size;
  const int64_t sparse_mode = call.integer("sparse_mode", 0);
  const bool is_causal = sparse_mode == 2 || sparse_mode == 3 || sparse_mode == 4;
  int64_t read = bytes_of(query);
  const auto item = static_cast<int64_t>(c10::elementSize(key.dtype));
  // Latents serve as keys and values: they are read once.
  const int64_t row = query_size + rope + (key.storage == value.storage ? 0 : value_size);
  for (size_t i = 0; i < sequences.query.size(); ++i) {
    const int64_t q = sequences.query[i];
    const int64_t k = sequences.key[i];
    if (q <= 0 || k <= 0) continue;
    int64_t scores = q * k;
    if (is_causal && k >= q) scores -= q * (q - 1) / 2;
    MatrixProduct product;
    product.batch = key_heads;
    product.m = q * (heads / key_heads);
    product.n = (scores + q - 1) / q;
    product.k = query_size + rope + value_size;
    product.arithmetic = arithmetic_of(query);
    work.products.push_back(product);
    work.vector_operations += kSoftmaxOperations * heads * scores;
    read += k * key_heads * row * item;
  }
  work.read_bytes = read;
  work.written_bytes = bytes_of(out);
}

}  // namespace vnpu::ops
