#pragma once

// Makes an AttentionProblem from tensors in the layouts of CANN's attention operators, and runs it.

#include <optional>
#include <string>
#include <vector>

#include "ops/attention/attention_kernel.h"
#include "ops/operator.h"

namespace vnpu::ops {

Element element_of(const Tensor& tensor);
// Refuses int8.
Element float_element(const Tensor& tensor);

// Null where the tensor is absent or empty.
const Tensor* first_of(const OptionalTensor& tensor);

// True if the tokens of all sequences follow each other.
bool is_packed_layout(const std::string& layout);

// A tensor [batch, heads, tokens, size] under any order of its dimensions. Strides count elements.
struct HeadView {
  Tensor tensor;  // keeps a dense copy alive where one was needed
  int64_t batches = 1, heads = 1, tokens = 0, size = 0;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  char* at(int64_t batch, int64_t token) const;
};
// `layout` names the dimensions: B batch, N heads, S tokens, T tokens of all sequences, D size of a
// head, H heads and sizes together. The elements of a head are made contiguous.
HeadView view_heads(const Tensor& tensor, const std::string& layout, int64_t heads);

// The keys that a query sees, by CANN's sparseMode, as the bounds of an AttentionRequest.
struct SparseMode {
  int64_t mode, pre_tokens, next_tokens;

  // In other modes the mask only states the pattern that the mode implies.
  bool uses_mask() const { return mode == 0 || mode == 1; }
  void check_mask(const OptionalTensor& mask, int64_t longest_query) const;
  void bound(AttentionRequest& request, bool has_mask) const;
};

// A mask or bias as [batch or 1, heads or 1, queries, keys].
Tensor four_dimensional_mask(const Tensor& mask, int64_t batches, int64_t queries);

// Lengths from an aclIntArray: one per request (or one for all), at most `limit`; `limit` when
// absent.
std::vector<int64_t> request_lengths(const OptionalIntArray& lengths, int64_t requests,
                                     int64_t limit, const char* name);
// Lengths of packed sequences from the ends of each, which must lie in [0, tokens].
std::vector<int64_t> packed_lengths(const IntArray& ends, int64_t tokens, const char* name);

// Runs the problem on the threads that ATen has.
void attend(const AttentionProblem& problem);

}  // namespace vnpu::ops
