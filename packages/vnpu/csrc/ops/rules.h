#pragma once

// What the documents of CANN allow an operator to be called with. Its row names a function,
//
//   Allowed allowed_scatter_pa_kv_cache() {
//     return {Workspace{16 * kMiB},
//             {
//                 {"key", dtype({at::kHalf, at::kBFloat16, at::kChar}), kDocument},
//                 {"value", contiguous(), kDocument},
//                 {"slotMapping", not_empty(), kTiling, {.tiling = true}},
//             }};
//   }
//
// A row names the argument, the rule and its source; it may hold for some chips and releases of
// CANN only. Names are those of the operator's row in ops/, without regard to `_` and capitals.
// A call is checked between its two phases, where nothing has been launched; one that breaks a rule
// is refused with CANN's status and a text that has argument, value, rule and source. Rules compare
// sizes, dtypes and numbers that the call has brought along: they read no memory of the device.
//
// From a rule that says in `form` what it is, tests make calls that it refuses; for others they are
// written by hand.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/chip.h"
#include "ops/argument_value.h"

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
  // Tensors, or numbers, in a list.
  int64_t count(size_t index = 0) const;
  bool has(size_t index = 0) const;
  // The rule's arguments from `first` on.
  RuleArguments after(size_t first) const { return {all_, positions_ + first}; }

 private:
  const ArgumentValue* all_;
  const int* positions_;
};

// What contradicts a rule: the value seen, "dtype float32"; nothing where all is well.
using Found = std::optional<std::string>;

// When a rule holds. names: the arguments that it looks at
struct Condition {
  std::string text;  // "inputLayout is TND"
  std::vector<const char*> names;
  std::function<bool(const RuleArguments&)> holds;
};

// A rule. `find` sees the row's argument first, then `names`.
struct Check {
  std::string text;  // completes "must": "be float16 or bfloat16"
  std::vector<const char*> names = {};
  std::function<Found(const RuleArguments&)> find;
  // Dtypes, sizes and amounts, which SoC `reference` does not limit. Otherwise: how arguments fit
  // each other and lie in memory.
  bool is_limit = true;
  // Called also when the argument or one of `names` is null.
  bool sees_absence = false;
  // What it is, as JSON: ["dtype", ["float16", "bfloat16"]]. Empty: a rule of its own kind.
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

struct Row {
  const char* argument;
  Check check;
  const char* source;
  Scope scope = {};
};

// Bytes that an operator asks for. copies: those of strided inputs are copied into it
struct Workspace {
  uint64_t bytes = 0;
  bool copies = false;
};

// The calls of an operator that the documents allow.
struct Allowed {
  Workspace workspace = {};
  std::vector<Row> rows = {};
  // Those that have the operator.
  unsigned chips = kA2 | kA3 | k310P;
};

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
// Any other. find: what is wrong
Check that(std::string text, std::vector<const char*> names,
           std::function<Found(const RuleArguments&)> find);
// The same about how arguments fit each other.
Check fits(std::string text, std::vector<const char*> names,
           std::function<Found(const RuleArguments&)> find);

Condition is_given(const char* argument);
Condition is_missing(const char* argument);
Condition equals(const char* argument, std::vector<std::string> texts);
Condition equals(const char* argument, std::vector<int64_t> numbers);
Condition has_dtype(const char* argument, std::vector<ScalarType> dtypes);
Condition both(Condition first, Condition second);

// For texts: "bfloat16", "[3, 2]".
std::string name_of(ScalarType type);
std::string sizes_of(const TensorView& view);
int64_t size_of(const TensorView& view, int dimension);
bool is_contiguous(const TensorView& view);

}  // namespace vnpu::ops
