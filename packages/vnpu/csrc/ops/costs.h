#pragma once

// The work of an operator, for the timing model. Its row names a function,
//
//   void cost_of_mm(const Call& call, timing::Work& work) {
//     multiply(work, call.tensor("self"), call.tensor("mat2"));
//   }
//
// The names of arguments are those of the operator's row, without regard to `_` and capitals.
// Before the function is called, `work` has the bytes of all operands, and nothing else. An
// operator without a cost cannot be launched where time is modelled; `vnpu coverage` lists those.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/argument_value.h"
#include "timing/work.h"

namespace vnpu::ops {

using timing::MatrixProduct;
using timing::Work;

// A call between its two phases.
class Call {
 public:
  Call(const ArgumentValue* values, const std::vector<std::string>& names)
      : values_(values), names_(names) {}

  // True if there is an argument of that name that is neither null nor an empty list.
  bool has(std::string_view name) const;
  // Of a list the first tensor; throws kInternal if the argument is no tensor.
  const TensorView& tensor(std::string_view name) const;
  std::vector<const TensorView*> tensors(std::string_view name) const;
  int64_t integer(std::string_view name, int64_t otherwise) const;
  // Null: none given.
  const std::vector<int64_t>* integers(std::string_view name) const;
  const std::string& text(std::string_view name) const;
  // Elements of the largest operand.
  int64_t largest() const;

 private:
  const ArgumentValue* find(std::string_view name) const;
  const ArgumentValue* values_;
  const std::vector<std::string>& names_;
};

using Cost = void (*)(const Call&, timing::Work&);

// Size of a dimension (-1: the last); 1 if the tensor does not have it.
int64_t size_of(const TensorView& view, int dimension);
int64_t bytes_of(const TensorView& view);
timing::Arithmetic arithmetic_of(const TensorView& view);
// Adds `operations` on each element of the largest operand.
void for_each_element(const Call& call, timing::Work& work, int64_t operations);
// The cost of an operator that only computes N operations per element.
template <int64_t kOperations>
void elements(const Call& call, timing::Work& work) {
  for_each_element(call, work, kOperations);
}
// The same on AI CPUs, not on vector cores.
template <int64_t kOperations>
void elements_on_ai_cpu(const Call& call, timing::Work& work) {
  for_each_element(call, work, kOperations);
  work.kind = timing::Work::Class::kAiCpu;
}
// Adds the product of [.., m, k] and [.., k, n].
void multiply(timing::Work& work, const TensorView& left, const TensorView& right);
// Of the rows that routing allocates, those that this rank's experts compute, and their bytes.
int64_t routed_rows(int64_t rows);
int64_t routed_bytes(const TensorView& rows);
// For a tensor that is written in part: the bytes of that part, read and written.
void write_part(Work& work, int64_t bytes, int64_t operations = 0);

}  // namespace vnpu::ops
