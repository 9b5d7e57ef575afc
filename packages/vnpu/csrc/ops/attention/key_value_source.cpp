#include "ops/attention/key_value_source.h"

namespace vnpu::ops {
namespace {

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

}  // namespace

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

RowSource Source::of(int64_t request, int64_t batch, int64_t first_token) const {
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

Source dense_source(const std::vector<Tensor>& tensors, const std::string& layout, int64_t heads) {
  Source source;
  for (const Tensor& tensor : tensors) source.views.push_back(view_heads(tensor, layout, heads));
  source.rows = row_source(source.views.front());
  return source;
}

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
    refuse("a paged cache has 3, 4 or 5 dimensions, this one has sizes " + c10::str(cache.sizes()) +
           ".");
  }
  if (source.views.front().tokens != block_size) {
    refuse("blockSize is " + std::to_string(block_size) + ", but the cache of sizes " +
           c10::str(cache.sizes()) + " has blocks of " +
           std::to_string(source.views.front().tokens) +
           " tokens. A cache has sizes [blocks, blockSize, heads * size] or "
           "[blocks, heads, blockSize, size].");
  }
  source.rows = row_source(source.views.front());
  return source;
}

std::vector<Tensor> with_prefix(const TensorList& tensors, const OptionalTensor& prefix,
                                const OptionalIntArray& prefix_length, const std::string& layout) {
  std::vector<Tensor> all(tensors.begin(), tensors.end());
  if (!prefix || prefix->numel() == 0) return all;
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

}  // namespace vnpu::ops
