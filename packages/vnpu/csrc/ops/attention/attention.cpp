#include "ops/attention/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace vnpu::ops {

Element element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return Element::kFloat;
    case at::kBFloat16: return Element::kBFloat16;
    case at::kHalf: return Element::kHalf;
    case at::kChar: return Element::kInt8;
    default:
      refuse(std::string("attention takes float16, bfloat16, float32 or int8, not ") +
             c10::toString(tensor.scalar_type()) + ".");
  }
}

Element float_element(const Tensor& tensor) {
  const Element element = element_of(tensor);
  require(element != Element::kInt8,
          "int8 is only possible with the scales that turn it into numbers.");
  return element;
}

const Tensor* first_of(const OptionalTensor& tensor) {
  return tensor && tensor->numel() > 0 ? &*tensor : nullptr;
}

bool is_packed_layout(const std::string& layout) { return layout == "TND" || layout == "NTD"; }

char* HeadView::at(int64_t batch, int64_t token) const {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         (batch * batch_stride + token * token_stride) *
             static_cast<int64_t>(tensor.element_size());
}

HeadView view_heads(const Tensor& tensor, const std::string& layout, int64_t heads) {
  if (tensor.dim() != static_cast<int64_t>(layout.size())) {
    refuse("layout " + layout + " names " + std::to_string(layout.size()) +
           " dimensions, the tensor has sizes " + c10::str(tensor.sizes()) + ".");
  }
  HeadView view;
  view.tensor = tensor.size(-1) > 1 && tensor.stride(-1) != 1 ? tensor.contiguous() : tensor;
  for (int64_t i = 0; i < view.tensor.dim(); ++i) {
    const int64_t size = view.tensor.size(i);
    const int64_t stride = view.tensor.stride(i);
    switch (layout[static_cast<size_t>(i)]) {
      case 'B': view.batches = size, view.batch_stride = stride; break;
      case 'N': view.heads = size, view.head_stride = stride; break;
      case 'S':
      case 'T': view.tokens = size, view.token_stride = stride; break;
      case 'D': view.size = size; break;
      case 'H':
        if (heads <= 0 || size % heads != 0) {
          refuse("a hidden size of " + std::to_string(size) + " is not a multiple of " +
                 std::to_string(heads) + " heads.");
        }
        view.heads = heads, view.size = size / heads, view.head_stride = view.size;
        break;
      default: refuse("layout " + layout + " is not known.");
    }
  }
  if (view.heads != heads) {
    refuse("the tensor of sizes " + c10::str(tensor.sizes()) + " in layout " + layout + " has " +
           std::to_string(view.heads) + " heads, but " + std::to_string(heads) + " are stated.");
  }
  return view;
}

void SparseMode::check_mask(const OptionalTensor& mask, int64_t longest_query) const {
  if (mode < 0 || mode > 4) {
    refuse("sparseMode " + std::to_string(mode) + " is not supported; use 0 to 4.");
  }
  if (mask && mask->scalar_type() != at::kBool && mask->scalar_type() != at::kChar &&
      mask->scalar_type() != at::kByte) {
    refuse(std::string("attenMask must be bool, int8 or uint8, not ") +
           c10::toString(mask->scalar_type()) + ".");
  }
  if (mode == 0 || longest_query <= 1) return;  // one query: the device ignores a missing mask
  if (!mask) refuse("sparseMode " + std::to_string(mode) + " needs attenMask.");
  constexpr int64_t kCompressed = 2048;  // the pattern that modes 2 to 4 are stated with
  if (mode != 1 &&
      (mask->dim() < 2 || mask->size(-1) != kCompressed || mask->size(-2) != kCompressed)) {
    refuse("sparseMode " + std::to_string(mode) +
           " needs the compressed attenMask of 2048 x 2048, this one has sizes " +
           c10::str(mask->sizes()) + ".");
  }
}

void SparseMode::bound(AttentionRequest& request, bool has_mask) const {
  constexpr int64_t kFar = int64_t{1} << 40;
  const int64_t pre = std::clamp(pre_tokens, -kFar, kFar);
  const int64_t next = std::clamp(next_tokens, -kFar, kFar);
  const int64_t shift = request.key_length - request.query_length;  // aligns the last query and key
  switch (mode) {
    case 0:
      // Upper-left corner; without a mask the device ignores both.
      if (has_mask) request.first_visible = -pre, request.last_visible = next;
      break;
    case 2: request.last_visible = 0; break;
    case 3: request.last_visible = shift; break;
    case 4: request.first_visible = shift - pre, request.last_visible = shift + next; break;
    default: break;
  }
}

Tensor four_dimensional_mask(const Tensor& mask, int64_t batches, int64_t queries) {
  const Tensor dense = mask.size(-1) > 1 && mask.stride(-1) != 1 ? mask.contiguous() : mask;
  switch (dense.dim()) {
    case 4: return dense;
    case 3: return dense.unsqueeze(1);
    case 2:
      // With one query per sequence, [batch, keys].
      return queries == 1 && dense.size(0) == batches ? dense.unsqueeze(1).unsqueeze(1)
                                                      : dense.unsqueeze(0).unsqueeze(0);
    default:
      refuse("a mask has 2 to 4 dimensions, this one has sizes " + c10::str(mask.sizes()) + ".");
  }
}

std::vector<int64_t> request_lengths(const OptionalIntArray& lengths, int64_t requests,
                                     int64_t limit, const char* name) {
  std::vector<int64_t> result(static_cast<size_t>(requests), limit);
  if (!lengths || lengths->empty()) return result;
  if (lengths->size() != 1 && lengths->size() < result.size()) {
    refuse(std::string(name) + " has " + std::to_string(lengths->size()) +
           " entries for a batch of " + std::to_string(requests) + ".");
  }
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = lengths->size() == 1 ? lengths->front() : (*lengths)[i];
    if (result[i] < 0 || result[i] > limit) {
      refuse(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(result[i]) +
             ", outside 0 to " + std::to_string(limit) + ".");
    }
  }
  return result;
}

std::vector<int64_t> packed_lengths(const IntArray& ends, int64_t tokens, const char* name) {
  std::vector<int64_t> lengths(ends.size());
  int64_t before = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    if (ends[i] < before || ends[i] > tokens) {
      refuse(std::string(name) + " must not decrease nor pass the " + std::to_string(tokens) +
             " tokens; entry " + std::to_string(i) + " is " + std::to_string(ends[i]) + " after " +
             std::to_string(before) + ".");
    }
    lengths[i] = ends[i] - before;
    before = ends[i];
  }
  return lengths;
}

void attend(const AttentionProblem& problem) {
  const int64_t group = problem.query_heads / problem.key_heads;
  std::vector<AttentionPiece> pieces;
  int64_t work = 0;  // multiplications, to see whether threads are worth their start
  for (size_t r = 0; r < problem.requests.size(); ++r) {
    const AttentionRequest& request = problem.requests[r];
    const int64_t rows = request.query_length * group;
    work += rows * problem.key_heads * std::max<int64_t>(1, request.key_length) *
            (problem.head_size + problem.rope_size + problem.value_size);
    // The last rows of a causal sequence see the most keys, so they go first and threads end
    // together.
    for (int64_t first = (rows - 1) / kMaxPieceRows * kMaxPieceRows; first >= 0 && rows > 0;
         first -= kMaxPieceRows) {
      for (int64_t head = 0; head < problem.key_heads; ++head) {
        pieces.push_back(
            {static_cast<int64_t>(r), head, first, std::min(kMaxPieceRows, rows - first)});
      }
    }
  }
  // About 0.1 ms of one core: a sleeping thread takes up to half of that to wake up.
  constexpr int64_t kWorthThreads = 1'000'000;
  const auto count = static_cast<int64_t>(pieces.size());
  if (work < kWorthThreads || count < 2 || at::get_num_threads() == 1) {
    for (const AttentionPiece& piece : pieces) attend_piece(problem, piece);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), count), 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++)
      attend_piece(problem, pieces[static_cast<size_t>(i)]);
  });
}

}  // namespace vnpu::ops
