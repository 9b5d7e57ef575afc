#pragma once

// Calls of an operator that CANN's documents allow. They stand in the operator's row, or in a
// function above it:
//
//   .rules = {"aclnnScatterPaKvCache.md, parameters",
//             {{"key", {dtype({at::kHalf, at::kBFloat16, at::kChar}), contiguous()}},
//              {"key_cache, value_cache", same_dtype("key")},
//              {"slot_mapping", not_empty(), "scatter_pa_kv_cache_tiling.cpp", {.tiling = true}}},
//             {.bytes = 16 * kMiB}}
//
// A rule names its arguments, the conditions on each, and its source if that differs from the
// row's. It may apply to some chips and releases of CANN only. Names are those of the operator's
// row, without regard to `_` and capitals. A call is checked between its two phases, where nothing
// has been launched; one that breaks a rule is refused with CANN's status and a text that has
// argument, value, rule and source. Rules compare sizes, dtypes and numbers that the call has
// brought along: they read no memory of the device.
//
// For a rule that states its kind in `form`, tests generate calls that it refuses; for other rules
// these are written by hand.

#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/chip.h"
#include "ops/argument_value.h"
#include "ops/costs.h"

namespace vnpu::ops {

inline constexpr uint64_t kMiB = 1 << 20;

// A rule's own arguments: the one that it is about, then the others that it names.
class RuleArguments {
 public:
  RuleArguments(const ArgumentValue* all, const int* positions)
      : all_(all), positions_(positions) {}
  const ArgumentValue& operator[](size_t index) const { return all_[positions_[index]]; }
  const TensorView& tensor(size_t index = 0) const;
  int64_t integer(size_t index = 0) const { return (*this)[index].integer; }
  const std::vector<int64_t>& integers(size_t index = 0) const { return *(*this)[index].integers; }
  const std::string& text(size_t index = 0) const { return *(*this)[index].text; }
  const TypedScalar& scalar(size_t index = 0) const { return *(*this)[index].scalar; }
  // Tensors in a list.
  int64_t count(size_t index = 0) const;
  bool has(size_t index = 0) const;
  // The rule's arguments from `first` on.
  RuleArguments after(size_t first) const { return {all_, positions_ + first}; }

 private:
  const ArgumentValue* all_;
  const int* positions_;
};

// The contradiction to a rule: the value seen, "dtype float32"; nothing if the call is allowed.
using Found = std::optional<std::string>;

// The condition of a rule. names: the arguments that it reads
struct Condition {
  std::string text;  // "inputLayout is TND"
  std::vector<const char*> names;
  std::function<bool(const RuleArguments&)> holds;
};

// A rule. `find` sees the row's argument first, then `names`.
struct Check {
  std::string text;  // completes "must": "be float16 or bfloat16"
  std::vector<const char*> names = {};
  std::function<Found(const RuleArguments&)> find = nullptr;
  // True for limits on dtypes, sizes and amounts, which SoC `reference` lacks. False for rules on
  // how arguments fit each other and lie in memory.
  bool is_limit = true;
  // Called also when the argument or one of `names` is null.
  bool sees_absence = false;
  // The rule's kind and values, as JSON: ["dtype", ["float16", "bfloat16"]]. Empty: a custom rule.
  std::string form = {};

  Check when(Condition condition) &&;
};

// Where and how a row applies.
struct Scope {
  unsigned chips = 0;  // Generation, or-ed; 0: all that have the operator
  CannRelease since = CannRelease::k8_3;
  CannRelease until = CannRelease::k9_0;  // inclusive
  bool tiling = false;  // found while tiling (561002), not among the parameters (161002)
};
inline constexpr unsigned kA2 = unsigned(Generation::kA2), kA3 = unsigned(Generation::kA3),
                          k310P = unsigned(Generation::k310P);
// Chips of the training servers. Documents that say nothing of 310P mean these.
inline constexpr unsigned kBigChips = kA2 | kA3;
inline constexpr Scope kOnBigChips{.chips = kBigChips};

inline std::string text(int64_t number) { return std::to_string(number); }

// What holds for an argument: a check, or several in braces.
struct Checks : std::vector<Check> {
  Checks(Check check) { push_back(std::move(check)); }
  Checks(std::initializer_list<Check> checks) : std::vector<Check>(checks) {}
};
// Each of these checks, under one condition.
Checks when(const Condition& condition, Checks checks);

struct Rule {
  Rule(const char* arguments, Checks checks, const char* source = nullptr, Scope scope = {})
      : arguments(arguments), checks(std::move(checks)), source(source), scope(scope) {}
  Rule(const char* arguments, Checks checks, Scope scope)
      : Rule(arguments, std::move(checks), nullptr, scope) {}

  const char* arguments;  // "self, other"
  Checks checks;
  const char* source;  // null: that of all
  Scope scope;
};

// Workspace that an operator needs. copies: copies of strided inputs
struct Workspace {
  uint64_t bytes = 0;
  bool copies = false;
};

// The calls of an operator that the documents allow; without any rule, no document limits them.
struct Rules {
  const char* source = nullptr;
  std::vector<Rule> list = {};
  Workspace workspace = {};
  // Chips that have the operator.
  unsigned chips = kA2 | kA3 | k310P;
};

std::vector<Rule> joined(std::vector<Rule> first, const std::vector<Rule>& second);

// One check of one argument.
struct Row {
  std::string argument;
  Check check;
  const char* source;
  Scope scope;
};
std::vector<Row> rows_of(const Rules& rules);

// --- rules -------------------------------------------------------------------------------------
// Of tensors, and of numbers that cross the interface with a dtype.
Check dtype(std::vector<ScalarType> allowed);
Check same_dtype(const char* other);
Check dims(int64_t least, int64_t most);
Check contiguous();
// Only rows, dimension 0, may lie apart.
Check contiguous_rows();
// Contiguous, or the transpose of the last two dimensions of what is.
Check contiguous_or_transposed();
Check not_empty();
Check absent();
Check present();
// Sizes of one dimension; negative ones count from the end.
Check size_in(int dimension, std::vector<int64_t> allowed);
Check size_between(int dimension, int64_t least, int64_t most, int64_t multiple = 1);
Check same_size(int dimension, const char* other, int other_dimension);
Check same_sizes(const char* other);
// A list has as many entries as another.
Check same_count(const char* other);
// Each tensor of a list has the sizes of the other list's.
Check same_sizes_each(const char* other);
// Numbers and texts.
Check between(int64_t least, int64_t most);
Check one_of(std::vector<int64_t> allowed);
Check one_of(std::vector<std::string> allowed);
template <std::integral... T>
Check one_of(T... allowed) {
  return one_of(std::vector<int64_t>{static_cast<int64_t>(allowed)...});
}
template <std::convertible_to<const char*>... T>
Check one_of(T... allowed) {
  return one_of(std::vector<std::string>{allowed...});
}
// Custom rules. holds: false for a call that is refused, by the values of the argument and of
// `names`. find: describes the contradiction
using Holds = std::function<bool(const RuleArguments&)>;
using Find = std::function<Found(const RuleArguments&)>;
Check that(std::string text, std::vector<const char*> names, Holds holds);
Check that(std::string text, std::vector<const char*> names, Find find);
// The same for rules on how arguments fit each other.
template <class Rule>
Check fits(std::string text, std::vector<const char*> names, Rule rule) {
  Check check = that(std::move(text), std::move(names), std::move(rule));
  check.is_limit = false;
  return check;
}

Condition is_given(const char* argument);
Condition is_missing(const char* argument);
Condition equals(const char* argument, std::vector<std::string> texts);
Condition equals(const char* argument, std::vector<int64_t> numbers);
template <std::integral... T>
Condition equals(const char* argument, T... numbers) {
  return equals(argument, std::vector<int64_t>{static_cast<int64_t>(numbers)...});
}
template <std::convertible_to<const char*>... T>
Condition equals(const char* argument, T... texts) {
  return equals(argument, std::vector<std::string>{texts...});
}
Condition has_dtype(const char* argument, std::vector<ScalarType> dtypes);
Condition both(Condition first, Condition second);

// For texts: "bfloat16", "[3, 2]".
std::string name_of(ScalarType type);
std::string sizes_of(const TensorView& view);
bool is_contiguous(const TensorView& view);

}  // namespace vnpu::ops
