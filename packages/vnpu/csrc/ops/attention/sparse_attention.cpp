// Sparse attention of DeepSeek V3.2: which cached tokens a query attends to (LightningIndexer), and
// multi-head latent attention over these alone (SparseFlashAttention).

#include <algorithm>

#include "ops/attention/key_value_source.h"
#include "ops/attention/kv_cache.h"
#include "ops/matmul/blocked_matmul.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

// Scores that are in memory at a time.
constexpr int64_t kScores = 1 << 23;

// Positions of a request's tokens: rows of tensors whose token dimensions are merged into one.
struct Sequence {
  int64_t first_query, queries;
  int64_t keys;
};

// The sequences of a call, and where their keys lie.
class Sequences {
 public:
  Sequences(const Tensor& query, const Text& query_layout, const OptionalTensor& query_lengths,
            const Tensor& key, const Text& key_layout, const OptionalTensor& key_lengths,
            const OptionalTensor& block_table)
      : key_layout_(key_layout), key_rows_(key.numel() / key.size(-1)) {
    const bool packed = query_layout == "TND";
    require(packed || query_layout == "BSND", "layoutQuery must be BSND or TND.");
    const std::vector<int64_t> given =
        query_lengths ? host_values(*query_lengths) : std::vector<int64_t>();
    if (packed) {
      int64_t before = 0;
      for (const int64_t length : packed_lengths(given, query.size(0), "actualSeqLengthsQuery")) {
        all.push_back({before, length, 0});
        before += length;
      }
    } else {
      for (int64_t i = 0; i < query.size(0); ++i) {
        const int64_t length = given.empty() ? query.size(1) : given.at(static_cast<size_t>(i));
        all.push_back({i * query.size(1), length, 0});
      }
    }
    place_keys(key, key_lengths, block_table);
  }

  // The row of a request's token among all keys.
  int64_t row(size_t request, int64_t token) const {
    if (key_layout_ != "PA_BSND") return first_key_[request] + token;
    const int64_t block = table_[request * static_cast<size_t>(blocks_per_request_) +
                                 static_cast<size_t>(token / block_size_)];
    const int64_t found = block * block_size_ + token % block_size_;
    if (block < 0 || found >= key_rows_) {
      refuse("blockTable names block " + std::to_string(block) + " of a cache of " +
             std::to_string(key_rows_ / block_size_) + ".");
    }
    return found;
  }
  Tensor rows(size_t request) const {
    std::vector<int64_t> found(static_cast<size_t>(all[request].keys));
    for (size_t i = 0; i < found.size(); ++i) found[i] = row(request, static_cast<int64_t>(i));
    return at::tensor(found, at::kLong);
  }

  std::vector<Sequence> all;

 private:
  void place_keys(const Tensor& key, const OptionalTensor& key_lengths,
                  const OptionalTensor& block_table) {
    std::vector<int64_t> lengths = key_lengths ? host_values(*key_lengths) : std::vector<int64_t>();
    int64_t room = 0;
    if (key_layout_ == "PA_BSND") {
      block_size_ = key.size(1);
      blocks_per_request_ = block_table->size(1);
      table_ = host_values(*block_table);
      room = blocks_per_request_ * block_size_;
    } else if (key_layout_ == "TND") {
      room = key.size(0);
      lengths = packed_lengths(lengths, room, "the keys' actual lengths");
    } else {
      room = key.size(1);
      if (lengths.empty()) lengths.assign(all.size(), room);
    }
    require(lengths.size() == all.size(), "there are as many lengths of keys as of queries.");
    int64_t before = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      if (lengths[i] < 0 || lengths[i] > room) {
        refuse("request " + std::to_string(i) + " has " + std::to_string(lengths[i]) +
               " keys, and there is room for " + std::to_string(room) + ".");
      }
      all[i].keys = lengths[i];
      first_key_.push_back(key_layout_ == "TND" ? before : static_cast<int64_t>(i) * room);
      before += lengths[i];
    }
  }

  Text key_layout_;
  int64_t key_rows_;
  int64_t block_size_ = 1, blocks_per_request_ = 0;
  std::vector<int64_t> table_, first_key_;
};

// The keys that a query sees: the last query sees all of them where the mode is causal.
int64_t seen_keys(const Sequence& sequence, int64_t query, int64_t sparse_mode) {
  if (sparse_mode == 0) return sequence.keys;
  return std::clamp<int64_t>(sequence.keys - sequence.queries + query + 1, 0, sequence.keys);
}

// The sum over heads of weight * max(0, query . key), in fp32: [queries, keys].
Tensor index_scores(const Tensor& query, const Tensor& transposed_keys, const Tensor& weights) {
  const int64_t tokens = query.size(0);
  const int64_t heads = query.size(1);
  const Tensor products = multiply_rows(query.flatten(0, 1), transposed_keys)
                              .view({tokens, heads, transposed_keys.size(1)});
  return products.relu_().mul_(weights.unsqueeze(-1)).sum(1);
}

// The rows of keys that a query reads, as blocks of one row.
struct Selection {
  std::vector<int32_t> rows;
  std::vector<int64_t> ends;  // of queries in `rows`
};

Selection selected_rows(const Sequences& sequences, const Tensor& indices, int64_t block,
                        int64_t sparse_mode) {
  const Tensor wide = indices.contiguous();
  const auto* const first = wide.const_data_ptr<int32_t>();
  const int64_t count = indices.size(-1);
  Selection found;
  std::vector<int64_t> tokens;
  for (size_t request = 0; request < sequences.all.size(); ++request) {
    const Sequence& sequence = sequences.all[request];
    for (int64_t query = 0; query < sequence.queries; ++query) {
      const int64_t seen = seen_keys(sequence, query, sparse_mode);
      const int32_t* const own = first + (sequence.first_query + query) * count;
      tokens.clear();
      for (int64_t i = 0; i < count && own[i] >= 0; ++i) {  // none follows an invalid one
        const int64_t begin = own[i] * block;
        for (int64_t token = begin; token < std::min(begin + block, seen); ++token) {
          tokens.push_back(token);
        }
      }
      // In the order of attention over all tokens, so that sums are equal if all are chosen.
      std::sort(tokens.begin(), tokens.end());
      for (const int64_t token : tokens) {
        found.rows.push_back(static_cast<int32_t>(sequences.row(request, token)));
      }
      found.ends.push_back(static_cast<int64_t>(found.rows.size()));
    }
  }
  return found;
}

// All rows of a tensor [..., size] as blocks of one row.
RowSource rows_of(const Tensor& tensor) {
  return paged_source(tensor.contiguous().view({-1, 1, tensor.size(-1)}), 1, 1).rows;
}

}  // namespace

constexpr char kIndexer[] = "aclnnLightningIndexer.md, parameters";
constexpr char kIndexerLimits[] = "aclnnLightningIndexer.md, constraints";
static Check counts_of_sparse_tokens() {
  return that("be 1 to 2048, or 3072, 4096, 5120, 6144, 7168 or 8192", {},
              [](const RuleArguments& own) {
                const int64_t count = own.integer();
                return count >= 1 && (count <= 2048 || (count <= 8192 && count % 1024 == 0));
              });
}
static Check float32_or_dtype_of(const char* other) {
  return that(std::string("be float32 or have the dtype of ") + other, {other},
              [](const RuleArguments& own) {
                const ScalarType type = own.tensor().dtype;
                return type == at::kFloat || type == own.tensor(1).dtype;
              });
}
// Rules that both operators have in common, about tables, lengths and layouts.
static Rules rules_of_both(const char* parameters, const char* limits, std::vector<Rule> more,
                           uint64_t workspace_bytes) {
  const auto on_pages = [] { return equals("key_layout", "PA_BSND"); };
  std::vector<Rule> rules{
      {"query", {dtype(kHalves), contiguous(), not_empty()}},
      {"query", dims(3, 3).when(equals("query_layout", "TND"))},
      {"query", dims(4, 4).when(equals("query_layout", "BSND"))},
      {"key", {same_dtype("query"), size_in(-2, {1})}, limits},
      {"key", dims(3, 3).when(equals("key_layout", "TND"))},
      {"key", dims(4, 4).when(equals("key_layout", "BSND", "PA_BSND"))},
      {"key", {contiguous(), not_empty()}},
      {"key", size_between(1, 16, 1024, 16).when(on_pages()), limits},
      {"query_lengths, key_lengths", {dtype({at::kInt}), dims(1, 1), contiguous()}},
      {"query_lengths", present().when(equals("query_layout", "TND"))},
      {"key_lengths", present().when(equals("key_layout", "TND", "PA_BSND"))},
      {"block_table", {dtype({at::kInt}), dims(2, 2), contiguous()}},
      {"block_table", present().when(on_pages())},
      {"query_layout", one_of("BSND", "TND")},
      {"key_layout", one_of("BSND", "TND", "PA_BSND")},
      {"sparse_mode", one_of(0, 3)},
      {"pre_tokens, next_tokens", one_of(INT64_MAX)}};
  rules.insert(rules.end(), more.begin(), more.end());
  return {parameters, std::move(rules), {.bytes = workspace_bytes}, kBigChips};
}
// Queries, and the keys that a cache or a sequence has room for: lengths are on the device.
namespace {
struct Rows {
  int64_t queries, keys;
};
}  // namespace
static Rows rows_of(const Call& call) {
  const TensorView& query = call.tensor("query");
  const TensorView& key = call.tensor("key");
  const int64_t queries =
      query.numel() / std::max<int64_t>(size_of(query, -1) * size_of(query, -2), 1);
  if (call.text("key_layout") == "PA_BSND") {
    return {queries, size_of(call.tensor("block_table"), 1) * size_of(key, 1)};
  }
  return {queries, size_of(key, call.text("key_layout") == "TND" ? 0 : 1)};
}
static Rules rules_of_lightning_indexer() {
  return rules_of_both(
      kIndexer, kIndexerLimits,
      {{"query", {size_in(-1, {128}), size_between(-2, 1, 64)}, kIndexerLimits},
       {"key", size_in(-1, {128}), kIndexerLimits},
       {"weights",
        {dtype({at::kHalf, at::kBFloat16, at::kFloat}), contiguous(), same_size(0, "query", 0)}},
       {"weights", float32_or_dtype_of("query"), kIndexerLimits},
       {"weights", dims(2, 2).when(equals("query_layout", "TND"))},
       {"weights", dims(3, 3).when(equals("query_layout", "BSND"))},
       {"sparse_count", counts_of_sparse_tokens()},
       {"returns_values", one_of(0).when(equals("key_layout", "PA_BSND"))},
       {"indices", {dtype({at::kInt}), contiguous()}}},
      16 * kMiB);
}
// One product of all heads' queries with the keys, then three operations on each score and the
// selection of the largest.
static void cost_of_lightning_indexer(const Call& call, Work& work) {
  const TensorView& query = call.tensor("query");
  const TensorView& key = call.tensor("key");
  const auto [queries, keys] = rows_of(call);
  const int64_t heads = size_of(query, -2);
  work.kind = timing::Work::Class::kAttention;
  work.wide = true;
  work.products.push_back({1, queries * heads, keys, size_of(query, -1), arithmetic_of(query)});
  work.vector_operations = queries * keys * (3 * heads + 8);
  const int64_t requests = call.has("key_lengths") ? call.tensor("key_lengths").numel() : 1;
  work.read_bytes =
      bytes_of(query) + bytes_of(call.tensor("weights")) +
      requests * keys * size_of(key, -1) * static_cast<int64_t>(c10::elementSize(key.dtype));
  work.written_bytes = bytes_of(call.tensor("indices"));
}
// indices: the chosen tokens of each query by falling score (of equal scores the earlier token
// first), then -1.
VNPU_OPERATOR(LightningIndexer,
              (const Tensor& query, const Tensor& key, const Tensor& weights,
               const OptionalTensor& query_lengths, const OptionalTensor& key_lengths,
               const OptionalTensor& block_table, const Text& query_layout, const Text& key_layout,
               int64_t sparse_count, int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens,
               bool returns_values, Out indices, OptionalOut values),
              {.tier = kT3,
               .cost = cost_of_lightning_indexer,
               .rules = rules_of_lightning_indexer()}) {
  (void)pre_tokens, (void)next_tokens;
  const Sequences sequences(query, query_layout, query_lengths, key, key_layout, key_lengths,
                            block_table);
  const int64_t heads = query.size(-2);
  const int64_t size = query.size(-1);
  const Tensor queries = query.reshape({-1, heads, size}).to(at::kFloat);
  const Tensor rates = weights.reshape({-1, heads}).to(at::kFloat);
  const Tensor keys = key.reshape({-1, size});
  const Tensor chosen = at::full({queries.size(0), sparse_count}, -1, at::kInt);
  const Tensor scores_of_chosen = at::zeros({queries.size(0), sparse_count}, at::kFloat);
  for (size_t request = 0; request < sequences.all.size(); ++request) {
    const Sequence& sequence = sequences.all[request];
    if (sequence.keys == 0) continue;
    const Tensor own = keys.index_select(0, sequences.rows(request)).to(at::kFloat).t();
    const Tensor places = at::arange(sequence.keys, at::kLong);
    const int64_t step = std::max<int64_t>(1, kScores / (heads * sequence.keys));
    for (int64_t begin = 0; begin < sequence.queries; begin += step) {
      const int64_t tokens = std::min(step, sequence.queries - begin);
      const int64_t first = sequence.first_query + begin;
      const Tensor scores =
          index_scores(queries.narrow(0, first, tokens), own, rates.narrow(0, first, tokens));
      std::vector<int64_t> seen;
      for (int64_t i = 0; i < tokens; ++i) {
        seen.push_back(seen_keys(sequence, begin + i, sparse_mode));
      }
      const Tensor ends = at::tensor(seen, at::kLong).unsqueeze(-1);
      scores.masked_fill_(places >= ends, -INFINITY);
      const int64_t count = std::min(sparse_count, sequence.keys);
      const auto [sorted, order] = scores.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
      const Tensor is_valid = places.narrow(0, 0, count) < ends;
      const Tensor found = order.narrow(1, 0, count).masked_fill(is_valid.logical_not(), -1);
      chosen.narrow(0, first, tokens).narrow(1, 0, count).copy_(found);
      scores_of_chosen.narrow(0, first, tokens)
          .narrow(1, 0, count)
          .copy_(sorted.narrow(1, 0, count));
    }
  }
  store(indices, chosen.view(indices.tensor.sizes()));
  if (returns_values) store(values, scores_of_chosen.view(values.tensor->sizes()));
}

constexpr char kSparse[] = "aclnnSparseFlashAttention.md, parameters";
constexpr char kSparseLimits[] = "aclnnSparseFlashAttention.md, constraints";
static Check divides_block_of(const char* cache) {
  return that("be 1 to 128 and divide the block size", {cache, "key_layout"},
              [](const RuleArguments& own) {
                const int64_t size = own.integer();
                const bool fits_block =
                    own.text(2) != "PA_BSND" || (size > 0 && size_of(own.tensor(1), 1) % size == 0);
                return size >= 1 && size <= 128 && fits_block;
              });
}
static Rules rules_of_sparse_flash_attention() {
  return rules_of_both(
      kSparse, kSparseLimits,
      {{"query", {size_in(-1, {512}), size_in(-2, {1, 2, 4, 8, 16, 32, 64, 128})}, kSparseLimits},
       {"key", size_in(-1, {512}), kSparseLimits},
       {"value", same_dtype("query"), kSparseLimits},
       {"value", {same_sizes("key"), contiguous()}},
       {"sparse_indices", {dtype({at::kInt}), contiguous(), not_empty(), same_size(0, "query", 0)}},
       {"sparse_indices", dims(3, 3).when(equals("query_layout", "TND"))},
       {"sparse_indices", dims(4, 4).when(equals("query_layout", "BSND"))},
       {"query_rope, key_rope", {present(), same_dtype("query"), contiguous()}},
       {"query_rope, key_rope", size_in(-1, {64}), kSparseLimits},
       {"sparse_block_size", divides_block_of("key"), kSparseLimits},
       {"attention_mode", one_of(2)},
       {"returns_softmax", one_of(0).when(equals("key_layout", "PA_BSND"))},
       {"out", {same_sizes("query"), same_dtype("query")}}},
      32 * kMiB);
}
// Each query reads its own rows: keys serve as values.
static void cost_of_sparse_flash_attention(const Call& call, Work& work) {
  const TensorView& query = call.tensor("query");
  const TensorView& key = call.tensor("key");
  const auto [queries, keys] = rows_of(call);
  const int64_t heads = size_of(query, -2);
  const int64_t rope = size_of(call.tensor("query_rope"), -1);
  const int64_t chosen =
      std::min(keys, size_of(call.tensor("sparse_indices"), -1) *
                         std::max<int64_t>(call.integer("sparse_block_size", 1), 1));
  work.kind = timing::Work::Class::kAttention;
  work.wide = true;
  work.products.push_back(
      {queries, heads, chosen, 2 * size_of(query, -1) + rope, arithmetic_of(query)});
  work.vector_operations = 6 * queries * heads * chosen;
  work.read_bytes = bytes_of(query) + bytes_of(call.tensor("query_rope")) +
                    queries * chosen * (size_of(key, -1) + rope) *
                        static_cast<int64_t>(c10::elementSize(key.dtype));
  work.written_bytes = bytes_of(call.tensor("out"));
}
VNPU_OPERATOR(SparseFlashAttention,
              (const Tensor& query, const Tensor& key, const Tensor& value,
               const Tensor& sparse_indices, const OptionalTensor& block_table,
               const OptionalTensor& query_lengths, const OptionalTensor& key_lengths,
               const OptionalTensor& query_rope, const OptionalTensor& key_rope, double scale,
               int64_t sparse_block_size, const Text& query_layout, const Text& key_layout,
               int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens, int64_t attention_mode,
               bool returns_softmax, Out out, OptionalOut softmax_max, OptionalOut softmax_sum),
              {.tier = kT3,
               .cost = cost_of_sparse_flash_attention,
               .rules = rules_of_sparse_flash_attention()}) {
  (void)pre_tokens, (void)next_tokens;
  require(attention_mode == 2 && query_rope && key_rope,
          "attentionMode 2, with queryRope and keyRope, is the only one.");
  const Sequences sequences(query, query_layout, query_lengths, key, key_layout, key_lengths,
                            block_table);
  const int64_t heads = query.size(-2);
  const Tensor queries = query.reshape({-1, heads, query.size(-1)}).contiguous();
  const Tensor ropes = query_rope->reshape({-1, heads, query_rope->size(-1)}).contiguous();
  const int64_t tokens = queries.size(0);
  const Tensor results = at::zeros({tokens, heads, value.size(-1)}, queries.options());
  const Tensor maximum = at::zeros({tokens, heads}, at::kFloat);
  const Tensor sum = at::zeros({tokens, heads}, at::kFloat);
  const Selection selection = selected_rows(sequences, sparse_indices.reshape({tokens, -1}),
                                            sparse_block_size, sparse_mode);
  const auto item = static_cast<int64_t>(queries.element_size());
  AttentionProblem problem;
  problem.query_heads = heads;
  problem.key_heads = 1;
  problem.head_size = queries.size(-1);
  problem.rope_size = ropes.size(-1);
  problem.value_size = value.size(-1);
  problem.scale = static_cast<float>(scale);
  problem.query_element = problem.out_element = element_of(queries);
  problem.query_rope_element = element_of(ropes);
  problem.query_head_stride = problem.head_size * item;
  problem.query_token_stride = heads * problem.query_head_stride;
  problem.query_rope_head_stride = problem.rope_size * item;
  problem.query_rope_token_stride = heads * problem.query_rope_head_stride;
  problem.out_head_stride = problem.value_size * item;
  problem.out_token_stride = heads * problem.out_head_stride;
  problem.lse_head_stride = 1;
  problem.lse_token_stride = heads;
  problem.block_size = 1;
  AttentionRequest request;
  request.query_length = 1;
  request.key = rows_of(key);
  request.value = rows_of(value);
  request.key_rope = rows_of(*key_rope);
  int64_t begin = 0;
  size_t number = 0;
  for (const Sequence& sequence : sequences.all) {
    for (int64_t i = 0; i < sequence.queries; ++i) {
      const int64_t token = sequence.first_query + i;
      request.query =
          static_cast<const char*>(queries.const_data_ptr()) + token * problem.query_token_stride;
      request.query_rope = static_cast<const char*>(ropes.const_data_ptr()) +
                           token * problem.query_rope_token_stride;
      request.out =
          static_cast<char*>(results.mutable_data_ptr()) + token * problem.out_token_stride;
      if (returns_softmax) {
        request.softmax_max = maximum.mutable_data_ptr<float>() + token * heads;
        request.softmax_sum = sum.mutable_data_ptr<float>() + token * heads;
      }
      request.block_table = selection.rows.data() + begin;
      request.key_length = selection.ends[number] - begin;
      begin = selection.ends[number++];
      problem.requests.push_back(request);
    }
  }
  attend(problem);
  store(out, results.view(out.tensor.sizes()));
  if (!returns_softmax) return;
  store(softmax_max, maximum.view(softmax_max.tensor->sizes()));
  store(softmax_sum, sum.view(softmax_sum.tensor->sizes()));
}

}  // namespace vnpu::ops
