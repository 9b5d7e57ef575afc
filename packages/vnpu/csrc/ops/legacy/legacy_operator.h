#pragma once

// Operators of the older interface (aclop). torch_npu asks for them where a tensor lies in a
// private layout, such as FRACTAL_NZ. A row has the operator's name, and its definition on tensors
// in row-major order; the machinery reads and writes layouts:
//
//   const bool add = legacy("Add", [](const LegacyArguments& a) -> Results {
//     return {at::add(a[0], a[1])};
//   });
//
// Inputs, attributes and results have the order and names that op-plugin gives them
// (op_plugin/ops/aclops). Results are cast to the dtype of their output and broadcast to its sizes.

#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "interface/legacy_call.h"
#include "ops/operator.h"

namespace vnpu::ops {

// The arguments of a call, while it runs.
class LegacyArguments {
 public:
  LegacyArguments(std::vector<Tensor> inputs, std::vector<std::vector<int64_t>> output_sizes,
                  const abi::LegacyAttributes& attributes)
      : inputs_(std::move(inputs)),
        output_sizes_(std::move(output_sizes)),
        attributes_(attributes) {}

  // An input; refuses the call where it has fewer.
  const Tensor& operator[](size_t index) const;
  const std::vector<Tensor>& inputs() const { return inputs_; }
  bool has(size_t index) const { return index < inputs_.size() && inputs_[index].defined(); }
  // The numbers that an input has, such as sizes and dimensions.
  std::vector<int64_t> numbers(size_t index) const;
  int64_t number(size_t index) const { return (*this)[index].item().toLong(); }
  const std::vector<int64_t>& output_sizes(size_t index = 0) const { return output_sizes_[index]; }

  // Attributes. The call fails if it has one that its row neither reads nor ignores explicitly.
  void pass_over(std::initializer_list<const char*> names) const {
    seen_.insert(names.begin(), names.end());
  }
  std::optional<std::string> unseen_attribute() const;
  bool flag(const char* name, bool otherwise = false) const;
  int64_t integer(const char* name, int64_t otherwise) const;
  double real(const char* name, double otherwise) const;
  std::vector<int64_t> integers(const char* name) const;

 private:
  // Null: the call does not have it.
  template <class Value>
  const Value* find(const char* name) const;

  std::vector<Tensor> inputs_;
  std::vector<std::vector<int64_t>> output_sizes_;
  const abi::LegacyAttributes& attributes_;
  mutable std::set<std::string> seen_;
};

using Results = std::vector<Tensor>;
using LegacyBody = Results (*)(const LegacyArguments&);
// What the timing model counts: each element, or a product of the first two inputs.
enum class LegacyWork { kElements, kProduct };

// names: of the operators, with spaces between. Always true.
bool legacy(const char* names, LegacyBody body, LegacyWork work = LegacyWork::kElements);
// Operators whose results are expressions of the arguments, `a`.
#define VNPU_LEGACY(VARIABLE, NAMES, ...) \
  const bool VARIABLE =                   \
      legacy(NAMES, [](const LegacyArguments& a) -> Results { return {__VA_ARGS__}; })

// Null where there is no operator of that type.
TaskPtr legacy_task(const abi::LegacyCall& call);

}  // namespace vnpu::ops
