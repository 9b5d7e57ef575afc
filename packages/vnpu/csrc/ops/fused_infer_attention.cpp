// aclnnFusedInferAttentionScore and its predecessors for prefill and decode: attention over keys and
// values that are dense, packed one sequence after the other, or paged.

#include <algorithm>
#include <limits>

#include "ops/attention.h"

namespace vnpu::ops {
namespace {

const Tensor* first_of(const OptionalTensor& tensor) {
  return tensor && tensor->numel() > 0 ? &*tensor : nullptr;
}

// What the versions of the operator share. References live as long as the call.
struct FusedInfer {
  const Tensor& query;
  const TensorList& key;
  const TensorList& value;
  int64_t query_heads;
  int64_t key_heads;  // 0: as many as query_heads
  double scale;
  std::string layout;  // of the input, or "input_output"
  SparseMode sparse;
  Tensor out;
  OptionalTensor bias = {}, mask = {};
  OptionalIntArray query_lengths = {}, key_lengths = {};
  OptionalTensor out_scale = {}, out_offset = {};
  OptionalTensor block_table = {};
  int64_t block_size = 0;
  OptionalTensor query_padding = {}, key_padding = {};
  OptionalTensor query_scale = {};
  OptionalTensor key_scale = {}, key_offset = {}, value_scale = {}, value_offset = {};
  int64_t key_quant_mode = 0, value_quant_mode = 0;
  OptionalTensor key_prefix = {}, value_prefix = {};
  OptionalIntArray prefix_length = {};
  OptionalTensor query_rope = {}, key_rope = {};
  OptionalTensor sink = {};
  OptionalTensor lse = {};  // null: not wanted
};

bool is_packed(const std::string& layout) { return layout == "TND" || layout == "NTD"; }

// Scales and offsets of int8 rows as floats, and where those of a request begin.
struct Scales {
  Tensor scale, offset;
  Dequantization how;
  int64_t request_stride = 0;
};

Scales dequantization(const Tensor& scale, const Tensor* offset, int64_t mode, int64_t heads,
                      int64_t size, int64_t requests, int64_t block_size) {
  Scales scales;
  scales.scale = scale.to(at::kFloat).contiguous();
  scales.how.scale = scales.scale.const_data_ptr<float>();
  if (offset != nullptr) {
    require(offset->numel() == scale.numel(), "antiquant scale and offset differ in size.");
    scales.offset = offset->to(at::kFloat).contiguous();
    scales.how.offset = scales.offset.const_data_ptr<float>();
  }
  const int64_t count = scale.numel();
  const int64_t last = scale.dim() > 0 ? scale.size(-1) : 1;
  const auto wrong = [&] {
    refuse("antiquant mode " + std::to_string(mode) + " does not fit scales of sizes " +
           c10::str(scale.sizes()) + " for " + std::to_string(heads) + " heads of " +
           std::to_string(size) + ".");
  };
  switch (mode) {
    case 0:  // per channel, or one for all
      if (count == heads * size) {
        scales.how.head = size, scales.how.channel = 1;
      } else if (count != 1) {
        wrong();
      }
      break;
    case 1:  // per token: [requests, tokens]
      if (count != requests * last) wrong();
      scales.how.token = 1, scales.request_stride = last;
      break;
    case 2:  // per head
      if (count != heads) wrong();
      scales.how.head = 1;
      break;
    case 3:  // per token and head: [requests, heads, tokens]
      if (count != requests * heads * last) wrong();
      scales.how.token = 1, scales.how.head = last, scales.request_stride = heads * last;
      break;
    case 4:  // per token, paged like the keys: [blocks, block_size]
      if (last != block_size) wrong();
      scales.how.token = 1, scales.how.block = last;
      break;
    case 5:  // per token and head, paged: [blocks, heads, block_size]
      if (last != block_size || count % (heads * last) != 0) wrong();
      scales.how.token = 1, scales.how.head = last, scales.how.block = heads * last;
      break;
    default: wrong();
  }
  return scales;
}

// Keys or values of all requests as one kind of source.
struct Source {
  std::vector<HeadView> views;  // one, or one per request
  RowSource rows;
  bool paged = false;
  std::optional<Scales> scales = {};

  // The rows of a request. `batch`: where they lie in a dense tensor, or which tensor of the list.
  RowSource of(int64_t request, int64_t batch, int64_t first_token) const {
    RowSource source = rows;
    if (!paged) {
      const bool one = views.size() == 1;
      source.data = views[one ? 0 : static_cast<size_t>(batch)].at(one ? batch : 0, first_token);
    }
    if (scales) {
      source.dequantization = scales->how;
      source.dequantization.scale += request * scales->request_stride;
      if (scales->how.offset != nullptr) {
        source.dequantization.offset += request * scales->request_stride;
      }
    }
    return source;
  }
};

RowSource row_source(const HeadView& view) {
  const auto item = static_cast<int64_t>(view.tensor.element_size());
  RowSource rows;
  rows.data = view.at(0, 0);
  rows.element = element_of(view.tensor);
  rows.width = view.size;
  rows.head_stride = view.head_stride * item;
  rows.token_stride = view.token_stride * item;
  rows.block_stride = view.batch_stride * item;
  return rows;
}

Source dense_source(const std::vector<Tensor>& tensors, const std::string& layout, int64_t heads) {
  Source source;
  for (const Tensor& tensor : tensors) source.views.push_back(view_heads(tensor, layout, heads));
  source.rows = row_source(source.views.front());
  return source;
}

// A cache: [blocks, block_size, heads * size], [blocks, heads, block_size, size], or
// [blocks, heads, size / piece, block_size, piece].
Source paged_source(const Tensor& cache, int64_t heads, int64_t block_size) {
  Source source;
  source.paged = true;
  if (cache.dim() == 3) {
    source.views.push_back(view_heads(cache, "BSH", heads));
  } else if (cache.dim() == 4) {
    source.views.push_back(view_heads(cache, "BNSD", heads));
  } else if (cache.dim() == 5) {
    // Pieces of 32 bytes per token: brought into rows, all blocks at once.
    const Tensor rows = cache.permute({0, 1, 3, 2, 4}).flatten(3, 4).contiguous();
    source.views.push_back(view_heads(rows, "BNSD", heads));
  } else {
    refuse("a paged cache has 3, 4 or 5 dimensions, this one has sizes " + c10::str(cache.sizes()) + ".");
  }
  if (source.views.front().tokens != block_size) {
    refuse("blockSize is " + std::to_string(block_size) + ", but the cache of sizes " +
           c10::str(cache.sizes()) + " has blocks of " + std::to_string(source.views.front().tokens) +
           " tokens. A cache has sizes [blocks, blockSize, heads * size] or "
           "[blocks, heads, blockSize, size].");
  }
  source.rows = row_source(source.views.front());
  return source;
}

// Keys with a prefix that all sequences share in front.
std::vector<Tensor> with_prefix(const TensorList& tensors, const OptionalTensor& prefix,
                                const OptionalIntArray& prefix_length, const std::string& layout) {
  std::vector<Tensor> all(tensors.begin(), tensors.end());
  if (first_of(prefix) == nullptr) return all;
  const auto tokens = static_cast<int64_t>(layout.find('S'));
  require(layout.find('S') != std::string::npos && all.size() == 1,
          "a shared prefix needs one key tensor in layout BSH, BSND or BNSD.");
  Tensor shared = *prefix;
  if (prefix_length && !prefix_length->empty()) {
    shared = shared.narrow(tokens, 0, prefix_length->front());
  }
  std::vector<int64_t> sizes(shared.sizes().begin(), shared.sizes().end());
  sizes[0] = all[0].size(0);
  all[0] = at::cat({shared.expand(sizes), all[0]}, tokens);
  return all;
}

int64_t padding_of(const OptionalTensor& padding, int64_t request) {
  if (first_of(padding) == nullptr) return 0;
  const Tensor values = padding->to(at::kLong).reshape({-1});
  const int64_t index = values.numel() == 1 ? 0 : request;
  return std::max<int64_t>(0, values[index].item<int64_t>());
}

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
               std::to_string(block) + ", but the cache has " + std::to_string(blocks) + " blocks.");
      }
    }
  }
}

Element float_element(const Tensor& tensor) {
  const Element element = element_of(tensor);
  require(element != Element::kInt8, "int8 is only possible with the scales that turn it into numbers.");
  return element;
}

void run(FusedInfer call);

// int8 results: round(out * scale + offset), computed from fp32 attention.
void run_quantized(FusedInfer& call) {
  const Tensor target = call.out;
  require(call.out_scale.has_value(), "an int8 attentionOut needs quantScale2.");
  call.out = at::empty(target.sizes(), target.options().dtype(at::kFloat));
  const OptionalTensor scale = call.out_scale;
  const OptionalTensor offset = call.out_offset;
  call.out_scale.reset();
  run(call);
  const std::string layout =
      call.layout.find('_') == std::string::npos ? call.layout : call.layout.substr(call.layout.find('_') + 1);
  const auto spread = [&](const Tensor& values) {
    Tensor wide = values.to(at::kFloat);
    if (wide.numel() == 1) return wide.reshape({});
    if (layout.back() == 'H') return wide.reshape({-1});
    wide = wide.reshape({call.query_heads, -1});
    if (layout == "BNSD") return wide.unsqueeze(1);
    if (layout == "NTD" || layout == "NBSD") {
      return layout == "NTD" ? wide.unsqueeze(1) : wide.unsqueeze(1).unsqueeze(1);
    }
    return wide;
  };
  Tensor quantized = call.out * spread(*scale);
  if (offset) quantized = quantized + spread(*offset);
  store(target, quantized.round_().clamp_(-128, 127));
}

void run(FusedInfer call) {
  if (call.query.numel() == 0) return;
  require(!call.key.empty() && call.key.size() == call.value.size(),
          "key and value must be lists of the same length, with at least one tensor.");
  if (call.key_heads == 0) call.key_heads = call.query_heads;
  if (call.query_heads <= 0 || call.key_heads <= 0 || call.query_heads % call.key_heads != 0) {
    refuse(std::to_string(call.query_heads) + " query heads are not a multiple of " +
           std::to_string(call.key_heads) + " key heads.");
  }
  if (call.out.scalar_type() == at::kChar) return run_quantized(call);
  require(!call.out_scale, "quantScale2 needs an int8 attentionOut.");

  const size_t cut = call.layout.find('_');
  const std::string layout = call.layout.substr(0, cut);
  const std::string out_layout = cut == std::string::npos ? layout : call.layout.substr(cut + 1);
  const bool packed = is_packed(layout);
  Tensor query_tensor = call.query;
  if (call.query_scale && query_tensor.scalar_type() == at::kChar) {
    // One scale per token and head: the query's sizes without that of a head.
    const Tensor heads = layout.back() == 'H' ? query_tensor.unflatten(-1, {call.query_heads, -1}) : query_tensor;
    query_tensor = (heads.to(at::kFloat) *
                    call.query_scale->to(at::kFloat).reshape(heads.sizes().slice(0, heads.dim() - 1)).unsqueeze(-1))
                       .reshape(query_tensor.sizes());
  }
  const HeadView query = view_heads(query_tensor, layout, call.query_heads);

  // Requests and their lengths.
  const bool paged = first_of(call.block_table) != nullptr;
  std::vector<int64_t> query_lengths;
  if (packed) {
    require(call.query_lengths.has_value(), "packed layouts (TND, NTD) need actualSeqLengths.");
    query_lengths = packed_lengths(*call.query_lengths, query.tokens, "actualSeqLengths");
  } else {
    // The device ignores the lengths of single queries.
    query_lengths = request_lengths(query.tokens == 1 ? OptionalIntArray() : call.query_lengths,
                                    query.batches, query.tokens, "actualSeqLengths");
  }
  const auto requests = static_cast<int64_t>(query_lengths.size());
  int64_t longest = 0;
  for (const int64_t length : query_lengths) longest = std::max(longest, length);

  Source key;
  Source value;
  Source key_rope;
  const bool rope = first_of(call.key_rope) != nullptr;
  require(rope == (first_of(call.query_rope) != nullptr), "queryRope and keyRope come together.");
  std::vector<int64_t> key_lengths;
  Tensor table;
  if (paged) {
    require(call.key.size() == 1, "paged keys and values are one tensor each.");
    require(call.key_lengths.has_value() && !call.key_lengths->empty(),
            "paged attention needs actualSeqLengthsKv.");
    if (call.block_size <= 0 || call.block_size % 16 != 0 || call.block_size > 1024) {
      refuse("blockSize is " + std::to_string(call.block_size) +
             "; it must be a multiple of 16, at most 1024.");
    }
    table = call.block_table->to(at::kInt).contiguous();
    if (table.dim() != 2 || table.size(0) < requests) {
      refuse("blockTable must be [requests, blocks], with a row for each of the " +
             std::to_string(requests) + " requests; its sizes are " + c10::str(table.sizes()) + ".");
    }
    key = paged_source(call.key[0], call.key_heads, call.block_size);
    value = paged_source(call.value[0], call.key_heads, call.block_size);
    if (rope) key_rope = paged_source(*call.key_rope, call.key_heads, call.block_size);
    key_lengths = request_lengths(call.key_lengths, requests, table.size(1) * call.block_size,
                                  "actualSeqLengthsKv");
    check_blocks(table, key_lengths, call.block_size, key.views.front().batches);
  } else {
    key = dense_source(with_prefix(call.key, call.key_prefix, call.prefix_length, layout), layout,
                       call.key_heads);
    value = dense_source(with_prefix(call.value, call.value_prefix, call.prefix_length, layout), layout,
                         call.key_heads);
    if (rope) key_rope = dense_source({*call.key_rope}, layout, call.key_heads);
    if (packed) {
      key_lengths = packed_lengths(call.key_lengths ? *call.key_lengths : *call.query_lengths,
                                   key.views.front().tokens, "actualSeqLengthsKv");
    } else {
      const int64_t prefix = key.views.front().tokens - view_heads(call.key[0], layout, call.key_heads).tokens;
      int64_t limit = 0;
      for (const HeadView& view : key.views) limit = std::max(limit, view.tokens);
      key_lengths = request_lengths(call.key_lengths, requests, limit - prefix, "actualSeqLengthsKv");
      for (int64_t& length : key_lengths) length += prefix;
      if (key.views.size() > 1) {
        require(static_cast<int64_t>(key.views.size()) == requests, "a key list has one tensor per request.");
        for (size_t r = 0; r < key_lengths.size(); ++r) {
          key_lengths[r] = std::min(key_lengths[r], key.views[r].tokens);
        }
      } else {
        require(key.views.front().batches == requests, "query and key differ in batch.");
      }
    }
    require(static_cast<int64_t>(key_lengths.size()) == requests,
            "actualSeqLengths and actualSeqLengthsKv differ in length.");
  }
  if (key.rows.width != query.size) {
    refuse("the heads of query have " + std::to_string(query.size) + " elements, those of key " +
           std::to_string(key.rows.width) + ".");
  }
  const auto quantized = [&](Source& source, const OptionalTensor& scale, const OptionalTensor& offset,
                             int64_t mode) {
    if (source.rows.element != Element::kInt8) return;
    require(first_of(scale) != nullptr, "int8 keys and values need antiquant scales.");
    source.scales = dequantization(*scale, first_of(offset), mode, call.key_heads, source.rows.width,
                                   requests, call.block_size);
  };
  quantized(key, call.key_scale, call.key_offset, call.key_quant_mode);
  quantized(value, call.value_scale, call.value_offset, call.value_quant_mode);
  if (rope) float_element(key_rope.views.front().tensor);

  // The result: rows of heads must be dense to be written in place.
  const bool in_place = call.out.size(-1) <= 1 || call.out.stride(-1) == 1;
  const Tensor out_tensor = in_place ? call.out : at::empty_like(call.out, at::MemoryFormat::Contiguous);
  const HeadView out = view_heads(out_tensor, out_layout, call.query_heads);
  if (out.size != value.rows.width) {
    refuse("the heads of attentionOut have " + std::to_string(out.size) + " elements, those of value " +
           std::to_string(value.rows.width) + ".");
  }

  AttentionProblem problem;
  problem.query_heads = call.query_heads;
  problem.key_heads = call.key_heads;
  problem.head_size = query.size;
  problem.value_size = value.rows.width;
  problem.scale = static_cast<float>(call.scale);
  problem.query_element = float_element(query.tensor);
  problem.out_element = element_of(out.tensor);
  const auto item = [](const HeadView& view) { return static_cast<int64_t>(view.tensor.element_size()); };
  problem.query_head_stride = query.head_stride * item(query);
  problem.query_token_stride = query.token_stride * item(query);
  problem.out_head_stride = out.head_stride * item(out);
  problem.out_token_stride = out.token_stride * item(out);
  problem.block_size = call.block_size;
  HeadView query_rope;
  if (rope) {
    query_rope = view_heads(*call.query_rope, layout, call.query_heads);
    require(query_rope.size == key_rope.rows.width, "queryRope and keyRope differ in size.");
    problem.rope_size = query_rope.size;
    problem.query_rope_element = float_element(query_rope.tensor);
    problem.query_rope_head_stride = query_rope.head_stride * item(query_rope);
    problem.query_rope_token_stride = query_rope.token_stride * item(query_rope);
  }
  Tensor sink;
  if (first_of(call.sink) != nullptr) {
    sink = call.sink->to(at::kFloat).contiguous();
    require(sink.numel() == call.query_heads, "learnableSink has one entry per query head.");
    problem.sink = sink.const_data_ptr<float>();
  }

  const bool has_mask = first_of(call.mask) != nullptr;
  call.sparse.check_mask(call.mask, longest);
  Tensor mask;
  if (has_mask && call.sparse.uses_mask()) {
    mask = four_dimensional_mask(*call.mask, requests, packed ? 0 : query.tokens);
    int64_t most_keys = 0;
    for (const int64_t length : key_lengths) most_keys = std::max(most_keys, length);
    if (mask.size(2) < longest || mask.size(3) < most_keys) {
      refuse("attenMask of sizes " + c10::str(call.mask->sizes()) + " does not cover " +
             std::to_string(longest) + " queries and " + std::to_string(most_keys) + " keys.");
    }
    problem.mask_head_stride = mask.size(1) == 1 ? 0 : mask.stride(1);
    problem.mask_query_stride = mask.stride(2);
  }
  Tensor bias;
  if (first_of(call.bias) != nullptr) {
    bias = four_dimensional_mask(*call.bias, requests, 0).to(at::kFloat);
    require(bias.size(2) >= longest, "pseShift has fewer rows than there are queries.");
    problem.bias_head_stride = bias.size(1) == 1 ? 0 : bias.stride(1);
    problem.bias_query_stride = bias.stride(2);
  }
  // The sparse mode and its bounds have no meaning for single queries in a dense layout, except for the
  // band, which the device honours with a mask.
  const bool bounded = packed || query.tokens > 1 || call.sparse.mode == 4;

  HeadView lse;
  if (call.lse) {
    const Tensor squeezed = call.lse->squeeze(-1);
    require(call.lse->scalar_type() == at::kFloat && squeezed.dim() == (packed ? 2 : 3),
            "softmaxLse must be float32 [tokens, heads, 1] or [batch, heads, queries, 1].");
    // Rows that no request covers are void.
    call.lse->fill_(std::numeric_limits<float>::infinity());
    lse = view_heads(call.lse.value(), packed ? "TND" : "BNSD", call.query_heads);
    problem.lse_head_stride = lse.head_stride;
    problem.lse_token_stride = lse.token_stride;
  }
  bool covered = true;
  for (const int64_t length : query_lengths) covered = covered && (packed || length == query.tokens);
  if (!covered) out_tensor.zero_();

  problem.requests.resize(static_cast<size_t>(requests));
  int64_t query_start = 0;
  int64_t key_start = 0;
  for (int64_t r = 0; r < requests; ++r) {
    AttentionRequest& request = problem.requests[static_cast<size_t>(r)];
    request.query_length = query_lengths[static_cast<size_t>(r)];
    request.key_length = key_lengths[static_cast<size_t>(r)];
    const int64_t batch = packed ? 0 : r;
    int64_t query_token = packed ? query_start : 0;
    int64_t key_token = packed ? key_start : 0;
    if (!packed && !paged) {  // rows at the right end of their space
      if (first_of(call.query_padding) != nullptr && query.tokens > 1) {
        query_token = query.tokens - padding_of(call.query_padding, r) - request.query_length;
      }
      if (first_of(call.key_padding) != nullptr) {
        key_token = key.views.front().tokens - padding_of(call.key_padding, r) - request.key_length;
      }
      require(query_token >= 0 && key_token >= 0, "padding and length exceed the space of a sequence.");
    }
    request.query = query.at(batch, query_token);
    request.out = out.at(batch, query_token);
    if (rope) request.query_rope = query_rope.at(batch, query_token);
    if (call.lse) request.lse = reinterpret_cast<float*>(lse.at(batch, query_token));
    request.key = key.of(r, batch, key_token);
    request.value = value.of(r, batch, key_token);
    if (rope) request.key_rope = key_rope.of(r, batch, key_token);
    if (paged) request.block_table = table.const_data_ptr<int32_t>() + r * table.size(1);
    if (bounded) call.sparse.bound(request, has_mask);
    if (mask.defined()) {
      request.mask = static_cast<const uint8_t*>(mask.const_data_ptr()) +
                     (mask.size(0) == 1 ? 0 : r * mask.stride(0));
    }
    if (bias.defined()) {
      request.bias = bias.const_data_ptr<float>() + (bias.size(0) == 1 ? 0 : r * bias.stride(0));
    }
    query_start += request.query_length;
    key_start += request.key_length;
  }
  attend(problem);
  if (!in_place) store(call.out, out_tensor);
}

// One scale tensor for keys and values, [2, ...], is an older form of two.
FusedInfer prepared(FusedInfer call, const OptionalTensor& scale_of_both,
                    const OptionalTensor& offset_of_both, int64_t mode_of_both, bool int8_products,
                    const OptionalTensor& lse) {
  // The products of int8 queries and keys are rescaled between the two matrix products on the device.
  if (int8_products) {
    refuse("attention between int8 queries, keys and values (deqScale1, quantScale1, deqScale2) is "
           "not supported; quantize only the keys and values.");
  }
  if (!call.key_scale && first_of(scale_of_both) != nullptr) {
    require(scale_of_both->size(0) == 2, "antiquantScale is [2, ...]: for keys and for values.");
    call.key_scale = scale_of_both->select(0, 0);
    call.value_scale = scale_of_both->select(0, 1);
    if (first_of(offset_of_both) != nullptr) {
      call.key_offset = offset_of_both->select(0, 0);
      call.value_offset = offset_of_both->select(0, 1);
    }
    call.key_quant_mode = call.value_quant_mode = mode_of_both;
  }
  call.lse = lse;
  return call;
}

}  // namespace

// The arguments that all versions begin with, those that they end with, and what is made of them.
#define VNPU_FUSED_INFER_INPUTS                                                                   \
  const Tensor& query, const TensorList& key, const TensorList& value, \
  const OptionalTensor& bias, const OptionalTensor& mask, \
  const OptionalIntArray& query_lengths, const OptionalIntArray& key_lengths, \
  const OptionalTensor& dequant_scores, const OptionalTensor& quant_weights, \
  const OptionalTensor& dequant_values, const OptionalTensor& out_scale, \
  const OptionalTensor& out_offset, const OptionalTensor& scale_of_both, \
  const OptionalTensor& offset_of_both, const OptionalTensor& block_table, \
  const OptionalTensor& query_padding, const OptionalTensor& key_padding, \
  const OptionalTensor& key_scale, const OptionalTensor& key_offset, \
  const OptionalTensor& value_scale, const OptionalTensor& value_offset, \
  const OptionalTensor& key_prefix, const OptionalTensor& value_prefix, \
  const OptionalIntArray& prefix_length
#define VNPU_FUSED_INFER_ATTRIBUTES \
  int64_t query_heads, double scale, int64_t pre_tokens, int64_t next_tokens, \
  const Text& layout, int64_t key_heads, int64_t sparse_mode, int64_t, \
  int64_t block_size, int64_t mode_of_both, bool wants_lse, int64_t key_mode, \
  int64_t value_mode

#define VNPU_FUSED_INFER_CALL                                                                     \
  prepared({query, key, value, query_heads, key_heads, scale, layout,                             \
            {sparse_mode, pre_tokens, next_tokens}, out.tensor, bias, mask, query_lengths,        \
            key_lengths, out_scale, out_offset, block_table, block_size, query_padding,           \
            key_padding, {}, key_scale, key_offset, value_scale, value_offset, key_mode,          \
            value_mode, key_prefix, value_prefix, prefix_length},                                 \
           scale_of_both, offset_of_both, mode_of_both,                                           \
           dequant_scores || quant_weights || dequant_values,                                     \
           wants_lse ? OptionalTensor(lse.tensor) : OptionalTensor())

VNPU_OPERATOR(FusedInferAttentionScoreV2,
              (VNPU_FUSED_INFER_INPUTS, VNPU_FUSED_INFER_ATTRIBUTES, Out out, Out lse)) {
  run(VNPU_FUSED_INFER_CALL);
}
VNPU_OPERATOR_MAX_WORKSPACE(FusedInferAttentionScoreV2)

VNPU_OPERATOR(FusedInferAttentionScoreV3,
              (VNPU_FUSED_INFER_INPUTS, const OptionalTensor& query_rope,
               const OptionalTensor& key_rope, const OptionalTensor&, VNPU_FUSED_INFER_ATTRIBUTES,
               Out out, Out lse)) {
  FusedInfer call = VNPU_FUSED_INFER_CALL;
  call.query_rope = query_rope;
  call.key_rope = key_rope;
  run(std::move(call));
}
VNPU_OPERATOR_MAX_WORKSPACE(FusedInferAttentionScoreV3)

VNPU_OPERATOR(FusedInferAttentionScoreV4,
              (VNPU_FUSED_INFER_INPUTS, const OptionalTensor& query_rope,
               const OptionalTensor& key_rope, const OptionalTensor&,
               const OptionalTensor& query_scale, const OptionalTensor& sink,
               VNPU_FUSED_INFER_ATTRIBUTES, int64_t, Out out, Out lse)) {
  FusedInfer call = VNPU_FUSED_INFER_CALL;
  call.query_rope = query_rope;
  call.key_rope = key_rope;
  call.query_scale = query_scale;
  call.sink = sink;
  run(std::move(call));
}
VNPU_OPERATOR_MAX_WORKSPACE(FusedInferAttentionScoreV4)

VNPU_OPERATOR(FusedInferAttentionScoreV5,
              (VNPU_FUSED_INFER_INPUTS, const OptionalTensor& query_rope,
               const OptionalTensor& key_rope, const OptionalTensor&,
               const OptionalTensor& query_scale, const OptionalTensor& sink,
               const OptionalIntArray&, const OptionalIntArray&, VNPU_FUSED_INFER_ATTRIBUTES, int64_t,
               int64_t, Out out, Out lse)) {
  FusedInfer call = VNPU_FUSED_INFER_CALL;
  call.query_rope = query_rope;
  call.key_rope = key_rope;
  call.query_scale = query_scale;
  call.sink = sink;
  run(std::move(call));
}
VNPU_OPERATOR_MAX_WORKSPACE(FusedInferAttentionScoreV5)

VNPU_OPERATOR(PromptFlashAttentionV3,
              (const Tensor& query, const Tensor& key, const Tensor& value,
               const OptionalTensor& bias, const OptionalTensor& mask,
               const OptionalIntArray& query_lengths, const OptionalIntArray& key_lengths,
               const OptionalTensor& dequant_scores, const OptionalTensor& quant_weights,
               const OptionalTensor& dequant_values, const OptionalTensor& out_scale,
               const OptionalTensor& out_offset, int64_t query_heads, double scale,
               int64_t pre_tokens, int64_t next_tokens, const Text& layout, int64_t key_heads,
               int64_t sparse_mode, int64_t, Out out)) {
  const TensorList keys{key};
  const TensorList values{value};
  run(prepared({query, keys, values, query_heads, key_heads, scale, layout,
                {sparse_mode, pre_tokens, next_tokens}, out.tensor, bias, mask, query_lengths,
                key_lengths, out_scale, out_offset},
               {}, {}, 0, dequant_scores || quant_weights || dequant_values, {}));
}

VNPU_OPERATOR(IncreFlashAttentionV4,
              (const Tensor& query, const TensorList& key, const TensorList& value,
               const OptionalTensor& bias, const OptionalTensor& mask,
               const OptionalIntArray& key_lengths, const OptionalTensor& dequant_scores,
               const OptionalTensor& quant_weights, const OptionalTensor& dequant_values,
               const OptionalTensor& out_scale, const OptionalTensor& out_offset,
               const OptionalTensor& scale_of_both, const OptionalTensor& offset_of_both,
               const OptionalTensor& block_table, const OptionalTensor& key_padding,
               int64_t query_heads, double scale, const Text& layout, int64_t key_heads,
               int64_t block_size, int64_t, Out out)) {
  constexpr int64_t kAll = std::numeric_limits<int32_t>::max();
  FusedInfer call{query, key, value, query_heads, key_heads, scale, layout, {0, kAll, kAll},
                  out.tensor, bias, mask, {}, key_lengths, out_scale, out_offset, block_table,
                  block_size};
  call.key_padding = key_padding;
  // One scale pair without a mode: per channel, or one for all.
  run(prepared(std::move(call), scale_of_both, offset_of_both, 0,
               dequant_scores || quant_weights || dequant_values, {}));
}

}  // namespace vnpu::ops
