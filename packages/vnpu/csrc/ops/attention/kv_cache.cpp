// Writing and reading the key-value cache.
//
// A paged cache has blocks of `block_size` tokens; slot s is token s % block_size of block
// s / block_size. Two layouts: "Norm" [blocks, block_size, heads, head_size], and "PA_NZ" with the
// row of a token, heads * head_size elements, cut into pieces of 32 bytes: [blocks, heads *
// head_size / piece, block_size, piece] (or with heads as a dimension of its own).

#include "ops/attention/kv_cache.h"
#include "ops/shared_rules.h"

#include <cstring>

namespace vnpu::ops {
namespace {

// The pieces of a token's row, each contiguous: where they lie in the cache and in [tokens, heads,
// size].
struct PagedLayout {
  char* data;
  int64_t blocks, block_size;
  int64_t block_stride, token_stride, piece_stride;  // bytes
  int64_t pieces, piece;                             // count, bytes

  char* at(int64_t slot, int64_t index) const {
    return data + slot / block_size * block_stride + slot % block_size * token_stride +
           index * piece_stride;
  }
};

CacheMode cache_mode_of(const Text& mode) {
  if (mode.empty() || mode == "Norm" || mode == "None") return CacheMode::kNorm;
  if (mode == "PA_NZ") return CacheMode::kPieces;
  refuse("cacheMode '" + mode + "' is not known. Use Norm or PA_NZ.");
}

// True when dimensions [first, last) follow each other without gaps.
bool dense(const Tensor& tensor, int64_t first, int64_t last) {
  int64_t step = 1;
  for (int64_t i = last - 1; i >= first; --i) {
    if (tensor.size(i) != 1 && tensor.stride(i) != step) return false;
    step *= tensor.size(i);
  }
  return true;
}

PagedLayout paged_layout(const Tensor& cache, CacheMode mode, bool heads_first,
                         int64_t row_elements) {
  const auto item = static_cast<int64_t>(cache.element_size());
  PagedLayout layout{};
  layout.data = static_cast<char*>(cache.mutable_data_ptr());
  layout.blocks = cache.size(0);
  layout.block_stride = cache.stride(0) * item;
  const auto shape = [&] { return c10::str(cache.sizes()); };
  if (mode == CacheMode::kPieces) {
    if (cache.dim() != 4 && cache.dim() != 5) {
      refuse("a PA_NZ cache has 4 or 5 dimensions, this one has sizes " + shape() + ".");
    }
    const int64_t last = cache.dim() - 1;
    layout.pieces = cache.dim() == 4 ? cache.size(1) : cache.size(1) * cache.size(2);
    require(cache.dim() == 4 || cache.size(1) == 1 ||
                cache.stride(1) == cache.size(2) * cache.stride(2),
            "the heads of a PA_NZ cache must follow each other without gaps.");
    layout.block_size = cache.size(last - 1);
    layout.token_stride = cache.stride(last - 1) * item;
    layout.piece_stride = cache.stride(last - 2) * item;
    layout.piece = cache.size(last) * item;
    require(dense(cache, last, last + 1), "the last dimension of the cache must be contiguous.");
  } else if (heads_first) {
    require(cache.dim() == 4, "an NHSD cache has sizes [blocks, heads, block_size, head_size].");
    require(dense(cache, 3, 4), "the last dimension of the cache must be contiguous.");
    layout.block_size = cache.size(2);
    layout.token_stride = cache.stride(2) * item;
    layout.piece_stride = cache.stride(1) * item;
    layout.pieces = cache.size(1);
    layout.piece = cache.size(3) * item;
  } else {
    if (cache.dim() != 3 && cache.dim() != 4) {
      refuse("a cache in layout Norm has sizes [blocks, block_size, heads, head_size], this one " +
             shape() + ".");
    }
    require(dense(cache, 2, cache.dim()), "the row of a token in the cache must be contiguous.");
    layout.block_size = cache.size(1);
    layout.token_stride = cache.stride(1) * item;
    layout.pieces = 1;
    layout.piece = cache.numel() / std::max<int64_t>(1, cache.size(0) * cache.size(1)) * item;
  }
  if (layout.pieces * layout.piece != row_elements * item) {
    refuse("a token has " + std::to_string(row_elements) + " elements, but the cache of sizes " +
           shape() + " holds " + std::to_string(layout.pieces * layout.piece / item) +
           " per token.");
  }
  return layout;
}

}  // namespace

void write_slots(const Tensor& rows, const Tensor& cache, const Tensor& slots, CacheMode mode,
                 bool heads_first) {
  const int64_t tokens = slots.size(0);
  if (rows.size(0) < tokens) {
    refuse("slotMapping names " + std::to_string(tokens) + " tokens, key or value has " +
           std::to_string(rows.size(0)) + ".");
  }
  require(rows.scalar_type() == cache.scalar_type(),
          "key or value differs from its cache in dtype.");
  if (tokens == 0 || rows.numel() == 0) return;
  const Tensor source = dense(rows, 1, rows.dim()) ? rows : rows.contiguous();
  const int64_t row_elements = source.numel() / source.size(0);
  const PagedLayout layout = paged_layout(cache, mode, heads_first, row_elements);
  const int64_t slot_count = layout.blocks * layout.block_size;
  const auto* const from = static_cast<const char*>(source.const_data_ptr());
  const int64_t row_bytes = source.stride(0) * static_cast<int64_t>(source.element_size());
  const auto write = [&](const auto* slot) {
    for (int64_t t = 0; t < tokens; ++t) {
      if (slot[t] < 0) continue;  // a token without a place, as padding has
      if (slot[t] >= slot_count) {
        refuse("slotMapping[" + std::to_string(t) + "] is " + std::to_string(slot[t]) +
               ", but the cache has " + std::to_string(slot_count) + " slots.");
      }
      for (int64_t i = 0; i < layout.pieces; ++i) {
        std::memcpy(layout.at(slot[t], i), from + t * row_bytes + i * layout.piece,
                    static_cast<size_t>(layout.piece));
      }
    }
  };
  const Tensor dense_slots = slots.contiguous();
  if (dense_slots.scalar_type() == at::kInt) {
    write(dense_slots.const_data_ptr<int32_t>());
  } else {
    require(dense_slots.scalar_type() == at::kLong, "slotMapping must be int32 or int64.");
    write(dense_slots.const_data_ptr<int64_t>());
  }
}

std::vector<int64_t> host_values(const Tensor& tensor) {
  const Tensor wide = tensor.to(at::kLong).contiguous();
  const auto* const data = wide.const_data_ptr<int64_t>();
  return {data, data + wide.numel()};
}

namespace {

void gather_blocks(const Tensor& cache, const Tensor& block_tables,
                   const std::vector<int64_t>& lengths, const std::vector<int64_t>& first_block,
                   CacheMode mode, const Tensor& out) {
  require(out.is_contiguous(), "key and value must be contiguous.");
  if (out.numel() == 0) return;
  const PagedLayout layout = paged_layout(cache, mode, false, out.numel() / out.size(0));
  const Tensor table = block_tables.to(at::kLong).contiguous();
  const auto* const blocks = table.const_data_ptr<int64_t>();
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const char* const end = to + out.nbytes();
  for (size_t r = 0; r < lengths.size(); ++r) {
    for (int64_t t = 0; t < lengths[r]; ++t) {
      const int64_t column = first_block[r] + t / layout.block_size;
      require(column < table.size(1), "blockTables has too few blocks for seqLens.");
      const int64_t block = blocks[static_cast<int64_t>(r) * table.size(1) + column];
      if (block < 0 || block >= layout.blocks) {
        refuse("blockTables names block " + std::to_string(block) + "; the cache has " +
               std::to_string(layout.blocks) + ".");
      }
      require(to < end, "seqLens sum to more tokens than key and value hold.");
      for (int64_t i = 0; i < layout.pieces; ++i) {
        std::memcpy(to + i * layout.piece,
                    layout.at(block * layout.block_size + t % layout.block_size, i),
                    static_cast<size_t>(layout.piece));
      }
      to += layout.pieces * layout.piece;
    }
  }
}

}  // namespace

constexpr char kScatterTiling[] = "scatter_pa_kv_cache_tiling.cpp";
const auto kNorms = std::vector<std::string>{"", "Norm", "None"};
const auto kPieces = std::vector<std::string>{"PA_NZ"};
static Check holds_a_row_per_token(const char* rows) {
  return fits(std::string("hold the heads of ") + rows, {rows}, [](const RuleArguments& own) {
    const TensorView& cache = own.tensor();
    const TensorView& row = own.tensor(1);
    return cache.dims == 4 && size_of(cache, 2) == size_of(row, 1) &&
           size_of(cache, 3) == size_of(row, 2);
  });
}
static Check holds_all_tokens() {
  return fits(
      "have a slot for each token", {"slot_mapping", "cache_mode"}, [](const RuleArguments& own) {
        const TensorView& cache = own.tensor();
        const int64_t slots = size_of(cache, 0) * size_of(cache, own.text(2) == "PA_NZ" ? -2 : 1);
        return slots >= own.tensor(1).numel();
      });
}
static Check pieces_of_32_bytes() {
  return that("end in pieces of 32 bytes", {}, [](const RuleArguments& own) {
    const TensorView& cache = own.tensor();
    const int64_t bytes = size_of(cache, -1) * static_cast<int64_t>(at::elementSize(cache.dtype));
    return bytes == 32;
  });
}
static Rules rules_of_scatter_pa_kv_cache() {
  return {"aclnnScatterPaKvCache.md, parameters",
          {{"key", {dtype({at::kHalf, at::kBFloat16, at::kChar}), dims(3, 4), contiguous()}},
           {"key", not_empty(), kScatterTiling, {.tiling = true}},
           {"value",
            {same_dtype("key"), contiguous(),
             fits("have the tokens and heads of key", {"key"},
                  [](const RuleArguments& own) {
                    const TensorView& value = own.tensor();
                    const TensorView& key = own.tensor(1);
                    return value.numel() == 0 || (size_of(value, 0) == size_of(key, 0) &&
                                                  size_of(value, 1) == size_of(key, 1));
                  })}},
           {"key_cache", {same_dtype("key"), dims(4, 5), contiguous()}},
           {"key_cache", holds_a_row_per_token("key").when(
                             both(equals("cache_mode", kNorms), is_missing("compress_lens")))},
           {"key_cache", holds_all_tokens().when(is_missing("compress_lens")), kScatterTiling},
           {"key_cache, value_cache", pieces_of_32_bytes().when(equals("cache_mode", kPieces))},
           {"value_cache", {same_dtype("key"), contiguous()}},
           {"slot_mapping", {dtype({at::kInt, at::kLong}), contiguous(), dims(1, 2)}},
           {"slot_mapping", same_size(0, "key", 0).when(is_missing("compress_lens"))},
           {"cache_mode", one_of("", "Norm", "None", "PA_NZ")}},
          {.bytes = 16 * kMiB},
          kBigChips};
}
static void cost_of_scatter_pa_kv_cache(const Call& call, Work& work) {
  int64_t bytes = bytes_of(call.tensor("key"));
  if (call.has("value")) bytes += bytes_of(call.tensor("value"));
  write_part(work, bytes);
}
VNPU_OPERATOR(ScatterPaKvCache,
              (const Tensor& key, InOut key_cache, const Tensor& slot_mapping,
               const OptionalTensor& value, OptionalInOut value_cache,
               const OptionalTensor& compress_lens, const OptionalTensor&, const OptionalTensor&,
               const Text& cache_mode, const Text& scatter_mode, const IntArray&, const IntArray&),
              {.tier = kT2,
               .cost = cost_of_scatter_pa_kv_cache,
               .rules = rules_of_scatter_pa_kv_cache()}) {
  // Compressed forms (a slot per head) exist on the device for a few chips only.
  if (compress_lens || slot_mapping.dim() != 1 || key.dim() == 4) {
    refuse(
        "compressed keys (4-D key, compressLens) are not supported; pass [tokens, heads, size].");
  }
  const bool heads_first = scatter_mode == "NHSD";
  if (!heads_first && !scatter_mode.empty() && scatter_mode != "None") {
    refuse("scatterMode '" + scatter_mode + "' is not supported; use None or NHSD.");
  }
  const CacheMode mode = cache_mode_of(cache_mode);
  write_slots(key, key_cache.tensor, slot_mapping, mode, heads_first);
  if (value && value_cache && value->numel() > 0) {
    write_slots(*value, *value_cache.tensor, slot_mapping, mode, heads_first);
  }
}

static Rules rules_of_gather_pa_kv_cache() {
  return {"aclnnGatherPaKvCache.md, parameters",
          {{"key_cache", {dtype({at::kHalf, at::kBFloat16, at::kChar}), contiguous()}},
           {"value_cache, key", {same_dtype("key_cache"), contiguous()}},
           {"value", {same_dtype("value_cache"), contiguous(), same_size(0, "key", 0)}},
           {"block_tables", {dtype({at::kInt}), dims(2, 2), contiguous(), not_empty()}},
           {"seq_lens", {dtype({at::kInt}), dims(1, 1), contiguous()}},
           {"seq_offset", {dtype({at::kInt}), contiguous()}},
           {"key",
            that("have rows of at most 148 KiB", {},
                 [](const RuleArguments& own) {
                   const TensorView& key = own.tensor();
                   int64_t bytes = static_cast<int64_t>(at::elementSize(key.dtype));
                   for (int i = 1; i < key.dims; ++i) bytes *= key.sizes[i];
                   return bytes <= 148 * 1024;
                 }),
            "gather_pa_kv_cache_tiling.cpp",
            {.tiling = true}}},
          {.bytes = 16 * kMiB},
          kBigChips};
}
static void cost_of_gather_pa_kv_cache(const Call& call, Work& work) {
  write_part(work, bytes_of(call.tensor("key")) + bytes_of(call.tensor("value")));
}
VNPU_OPERATOR(GatherPaKvCache,
              (const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
               const Tensor& seq_lens, InOut key, InOut value, const OptionalTensor& seq_offset,
               const Text& cache_mode, bool cumulative),
              {.tier = kT2,
               .cost = cost_of_gather_pa_kv_cache,
               .rules = rules_of_gather_pa_kv_cache()}) {
  const CacheMode mode = cache_mode_of(cache_mode);
  std::vector<int64_t> lengths = host_values(seq_lens);
  if (cumulative) {  // [0, end of request 0, end of request 1, ...]
    for (size_t i = lengths.size(); i-- > 1;) lengths[i] -= lengths[i - 1];
    if (!lengths.empty()) lengths.erase(lengths.begin());
  }
  const auto requests = static_cast<int64_t>(lengths.size());
  if (requests > block_tables.size(0)) {
    refuse("seqLens has " + std::to_string(requests) + " requests, blockTables " +
           std::to_string(block_tables.size(0)) + " rows.");
  }
  const auto first_blocks = [&](int64_t block_size) {
    std::vector<int64_t> first(lengths.size(), 0);
    if (!seq_offset) return first;
    const std::vector<int64_t> offsets = host_values(*seq_offset);
    require(offsets.size() >= first.size(), "seqOffset has fewer entries than there are requests.");
    for (size_t i = 0; i < first.size(); ++i) first[i] = offsets[i] / block_size;
    return first;
  };
  const int64_t block_dimension = mode == CacheMode::kNorm ? 1 : key_cache.dim() - 2;
  const std::vector<int64_t> first =
      first_blocks(std::max<int64_t>(1, key_cache.size(block_dimension)));
  gather_blocks(key_cache, block_tables, lengths, first, mode, key.tensor);
  gather_blocks(value_cache, block_tables, lengths, first, mode, value.tensor);
}

}  // namespace vnpu::ops
