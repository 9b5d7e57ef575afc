#include "ops/attention/fused_attention.h"

#include <algorithm>
#include <limits>

#include "ops/attention/keys_and_values.h"

namespace vnpu::ops {
namespace {

int64_t padding_of(const OptionalTensor& padding, int64_t request) {
  if (first_of(padding) == nullptr) return 0;
  const Tensor values = padding->to(at::kLong).reshape({-1});
  const int64_t index = values.numel() == 1 ? 0 : request;
  return std::max<int64_t>(0, values[index].item<int64_t>());
}

// int8 results: round(out * scale + offset), computed from fp32 attention.
void run_quantized(FusedAttention& call) {
  const Tensor target = call.out;
  require(call.out_scale.has_value(), "an int8 attentionOut needs quantScale2.");
  call.out = at::empty(target.sizes(), target.options().dtype(at::kFloat));
  const OptionalTensor scale = call.out_scale;
  const OptionalTensor offset = call.out_offset;
  call.out_scale.reset();
  run(call);
  const std::string layout = call.layout.find('_') == std::string::npos
                                 ? call.layout
                                 : call.layout.substr(call.layout.find('_') + 1);
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

}  // namespace

void run(FusedAttention call) {
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
  const bool packed = is_packed_layout(layout);
  Tensor query_tensor = call.query;
  if (call.query_scale && query_tensor.scalar_type() == at::kChar) {
    // One scale per token and head: the query's sizes without that of a head.
    const Tensor heads =
        layout.back() == 'H' ? query_tensor.unflatten(-1, {call.query_heads, -1}) : query_tensor;
    query_tensor = (heads.to(at::kFloat) * call.query_scale->to(at::kFloat)
                                               .reshape(heads.sizes().slice(0, heads.dim() - 1))
                                               .unsqueeze(-1))
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

  const bool rope = first_of(call.key_rope) != nullptr;
  require(rope == (first_of(call.query_rope) != nullptr), "queryRope and keyRope come together.");
  const KeysAndValues keys = keys_and_values(call, layout, requests, query.size);
  const Source& key = keys.key;
  const Source& value = keys.value;
  const Source& key_rope = keys.key_rope;
  const std::vector<int64_t>& key_lengths = keys.lengths;
  const Tensor& table = keys.table;

  // The result: rows of heads must be dense to be written in place.
  const bool in_place = call.out.size(-1) <= 1 || call.out.stride(-1) == 1;
  const Tensor out_tensor =
      in_place ? call.out : at::empty_like(call.out, at::MemoryFormat::Contiguous);
  const HeadView out = view_heads(out_tensor, out_layout, call.query_heads);
  if (out.size != value.rows.width) {
    refuse("the heads of attentionOut have " + std::to_string(out.size) +
           " elements, those of value " + std::to_string(value.rows.width) + ".");
  }

  AttentionProblem problem;
  problem.query_heads = call.query_heads;
  problem.key_heads = call.key_heads;
  problem.head_size = query.size;
  problem.value_size = value.rows.width;
  problem.scale = static_cast<float>(call.scale);
  problem.query_element = float_element(query.tensor);
  problem.out_element = element_of(out.tensor);
  const auto item = [](const HeadView& view) {
    return static_cast<int64_t>(view.tensor.element_size());
  };
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
    require(bias.size(2) == 1 || bias.size(2) >= longest,
            "pseShift has fewer rows than there are queries.");
    problem.bias_head_stride = bias.size(1) == 1 ? 0 : bias.stride(1);
    problem.bias_query_stride = bias.size(2) == 1 ? 0 : bias.stride(2);
    problem.bias_factor = static_cast<float>(call.bias_factor);
  }
  // The sparse mode and its bounds have no meaning for single queries in a dense layout, except for
  // the band, which the device honours with a mask.
  const bool bounded =
      packed || query.tokens > 1 || call.sparse.mode == 4 || call.single_queries_bounded;

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
  // [..., 8]: the first of eight equal values is computed.
  HeadView highest;
  HeadView total;
  if (call.softmax_max && call.softmax_sum) {
    highest = view_heads(*call.softmax_max, packed ? "TND" : "BNSD", call.query_heads);
    total = view_heads(*call.softmax_sum, packed ? "TND" : "BNSD", call.query_heads);
    require(call.softmax_max->scalar_type() == at::kFloat &&
                call.softmax_sum->scalar_type() == at::kFloat &&
                highest.head_stride == total.head_stride &&
                highest.token_stride == total.token_stride,
            "softmaxMax and softmaxSum must be float32 and alike.");
    problem.lse_head_stride = highest.head_stride;
    problem.lse_token_stride = highest.token_stride;
  }
  bool covered = true;
  for (const int64_t length : query_lengths)
    covered = covered && (packed || length == query.tokens);
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
      require(query_token >= 0 && key_token >= 0,
              "padding and length exceed the space of a sequence.");
    }
    request.query = query.at(batch, query_token);
    request.out = out.at(batch, query_token);
    if (rope) request.query_rope = query_rope.at(batch, query_token);
    if (call.lse) request.lse = reinterpret_cast<float*>(lse.at(batch, query_token));
    if (call.softmax_max && call.softmax_sum) {
      request.softmax_max = reinterpret_cast<float*>(highest.at(batch, query_token));
      request.softmax_sum = reinterpret_cast<float*>(total.at(batch, query_token));
    }
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
  for (const OptionalTensor& statistic : {call.softmax_max, call.softmax_sum}) {
    if (statistic) statistic->copy_(statistic->narrow(-1, 0, 1).clone().expand(statistic->sizes()));
  }
  if (!in_place) store(call.out, out_tensor);
}

}  // namespace vnpu::ops
