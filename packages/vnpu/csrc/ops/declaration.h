#pragma once

// What a row of an operator declares beside its arguments and its body:
//
//   VNPU_OPERATOR(Gelu, (const Tensor& self, Out out),
//                 {.cost = elements<10>, .rules = {...}}) {
//
// From it come the operator's place in `vnpu coverage`, the work that the timing model gives it
// (ops/costs.h), the calls that are refused (ops/rules.h) and its line on the reference pages.

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "ops/costs.h"
#include "ops/rules.h"

namespace vnpu::ops {

class Constraints;  // ops/constraints.cpp

// The models that need an operator.
enum class Tier : uint8_t {
  kT1,     // plain PyTorch in model execution
  kT2,     // fused serving operators
  kT3,     // rare: LoRA, linear and sparse attention
  kOther,  // training, vision, other accelerators' paths
};
using enum Tier;

struct Declaration {
  Tier tier = kT1;
  // Null: the operator cannot be launched where time is modelled.
  Cost cost = nullptr;
  Rules rules = {};
};

// An operator as its row declares it; one static object for each row.
class Operator {
 public:
  // name: "aclnnAdd". parameters: as the row spells them.
  // declare: the row's Declaration, which is made when it is first asked for
  Operator(const char* name, const char* parameters, Declaration (*declare)());

  // The newest one; the others follow by `before`.
  static const Operator* newest();

  const Declaration& declared() const;
  // Of the arguments, plain (ops/parameters.h).
  const std::vector<std::string>& names() const;
  // The rules for its calls; null if there are none, or nothing is checked.
  const Constraints* constraints() const;

  const char* const name;
  const char* const parameters;
  const Operator* const before;

 private:
  Declaration (*const declare_)();
  mutable std::once_flag declared_once_;
  mutable Declaration declared_;
  mutable std::once_flag named_;
  mutable std::vector<std::string> names_;
  mutable std::once_flag bound_;
  mutable std::atomic<bool> is_bound_ = false;
  mutable const Constraints* constraints_ = nullptr;
};

// The operator of a name with "aclnn"; null where there is none.
const Operator* operator_named(const std::string& name);

// "T1"; "-" for kOther.
const char* text_of(Tier tier);

// All operators, one JSON object a line: operator, tier, priced, arguments.
std::string listed_operators();

}  // namespace vnpu::ops
