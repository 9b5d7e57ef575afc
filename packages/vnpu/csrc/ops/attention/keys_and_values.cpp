#include "ops/attention/keys_and_values.h"

#include <algorithm>

namespace vnpu::ops {
namespace {

void check_blocks(const Tensor& table, const std::vector<int64_t>& key_lengths, int64_t block_size,
                  int64_t blocks) {
  const auto* const entries = table.const_data_ptr<int32_t>();
  for (size_t r = 0; r < key_lengths.size(); ++r) {
    const int64_t used = (key_lengths[r] + block_size - 1) / block_size;
    if (used > table.size(1)) {
      refuse("request " + std::to_string(r) + " has " + std::to_string(key_lengths[r]) +
             " keys, more than its " + std::to_string(table.size(1)) + " blocks of " +
             std::to_string(block_size) + " hold.");
    }
    for (int64_t i = 0; i < used; ++i) {
      const int32_t block = entries[static_cast<int64_t>(r) * table.size(1) + i];
      if (block < 0 || block >= blocks) {
        refuse("blockTable[" + std::to_string(r) + "][" + std::to_string(i) + "] is " +
               std::to_string(block) + ", but the cache has " + std::to_string(blocks) +
               " blocks.");
      }
    }
  }
}

KeysAndValues paged_keys(const FusedAttention& call, int64_t requests) {
  require(call.key.size() == 1, "paged keys and values are one tensor each.");
  require(call.key_lengths.has_value() && !call.key_lengths->empty(),
          "paged attention needs actualSeqLengthsKv.");
  if (call.block_size <= 0 || call.block_size % 16 != 0 || call.block_size > 1024) {
    refuse("blockSize is " + std::to_string(call.block_size) +
           "; it must be a multiple of 16, at most 1024.");
  }
  const Tensor table = call.block_table->to(at::kInt).contiguous();
  if (table.dim() != 2 || table.size(0) < requests) {
    refuse("blockTable must be [requests, blocks], with a row for each of the " +
           std::to_string(requests) + " requests; its sizes are " + c10::str(table.sizes()) + ".");
  }
  KeysAndValues keys{paged_source(call.key[0], call.key_heads, call.block_size),
                     paged_source(call.value[0], call.key_heads, call.block_size)};
  if (first_of(call.key_rope) != nullptr) {
    keys.key_rope = paged_source(*call.key_rope, call.key_heads, call.block_size);
  }
  keys.lengths = request_lengths(call.key_lengths, requests, table.size(1) * call.block_size,
                                 "actualSeqLengthsKv");
  check_blocks(table, keys.lengths, call.block_size, keys.key.views.front().batches);
  keys.table = table;
  return keys;
}

// Lengths of requests whose keys are [batch, ...], or a tensor each.
std::vector<int64_t> lengths_of_batch(const FusedAttention& call, const std::string& layout,
                                      const std::vector<HeadView>& keys, int64_t requests) {
  const int64_t prefix =
      keys.front().tokens - view_heads(call.key[0], layout, call.key_heads).tokens;
  int64_t limit = 0;
  for (const HeadView& view : keys) limit = std::max(limit, view.tokens);
  std::vector<int64_t> lengths =
      request_lengths(call.key_lengths, requests, limit - prefix, "actualSeqLengthsKv");
  for (int64_t& length : lengths) length += prefix;
  if (keys.size() > 1) {
    require(static_cast<int64_t>(keys.size()) == requests,
            "a key list has one tensor per request.");
    for (size_t r = 0; r < lengths.size(); ++r) lengths[r] = std::min(lengths[r], keys[r].tokens);
  } else {
    require(keys.front().batches == requests, "query and key differ in batch.");
  }
  return lengths;
}

KeysAndValues dense_keys(const FusedAttention& call, const std::string& layout, int64_t requests) {
  const auto source = [&](const TensorList& tensors, const OptionalTensor& prefix) {
    return dense_source(with_prefix(tensors, prefix, call.prefix_length, layout), layout,
                        call.key_heads);
  };
  // Braces fix the order of evaluation.
  KeysAndValues keys{source(call.key, call.key_prefix), source(call.value, call.value_prefix)};
  if (first_of(call.key_rope) != nullptr) {
    keys.key_rope = dense_source({*call.key_rope}, layout, call.key_heads);
  }
  keys.lengths = is_packed_layout(layout)
                     ? packed_lengths(call.key_lengths ? *call.key_lengths : *call.query_lengths,
                                      keys.key.views.front().tokens, "actualSeqLengthsKv")
                     : lengths_of_batch(call, layout, keys.key.views, requests);
  require(static_cast<int64_t>(keys.lengths.size()) == requests,
          "actualSeqLengths and actualSeqLengthsKv differ in length.");
  return keys;
}

}  // namespace

KeysAndValues keys_and_values(const FusedAttention& call, const std::string& layout,
                              int64_t requests, int64_t head_size) {
  KeysAndValues keys = first_of(call.block_table) != nullptr ? paged_keys(call, requests)
                                                             : dense_keys(call, layout, requests);
  if (keys.key.rows.width != head_size) {
    refuse("the heads of query have " + std::to_string(head_size) + " elements, those of key " +
           std::to_string(keys.key.rows.width) + ".");
  }
  const auto quantized = [&](Source& source, const OptionalTensor& scale,
                             const OptionalTensor& offset, int64_t mode) {
    if (source.rows.element != Element::kInt8) return;
    require(first_of(scale) != nullptr, "int8 keys and values need antiquant scales.");
    source.scales = dequantization(*scale, first_of(offset), mode, call.key_heads,
                                   source.rows.width, requests, call.block_size);
  };
  quantized(keys.key, call.key_scale, call.key_offset, call.key_quant_mode);
  quantized(keys.value, call.value_scale, call.value_offset, call.value_quant_mode);
  if (first_of(call.key_rope) != nullptr) float_element(keys.key_rope.views.front().tensor);
  return keys;
}

}  // namespace vnpu::ops
