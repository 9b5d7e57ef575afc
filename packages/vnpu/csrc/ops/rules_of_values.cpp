// Values of arguments as rules see them, rules about numbers and texts, and conditions.

#include "ops/rules.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "ops/rule_text.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {

// --- values --------------------------------------------------------------------------------------

const TensorView& RuleArguments::tensor(size_t index) const {
  const ArgumentValue& value = (*this)[index];
  // The rules of a list hold for each of its tensors; comparing rules look at the first.
  return value.kind == ArgumentValue::Kind::kTensors ? value.tensors[0] : *value.tensor;
}

int64_t RuleArguments::count(size_t index) const { return (*this)[index].tensors.count; }

bool RuleArguments::has(size_t index) const {
  const ArgumentValue& value = (*this)[index];
  switch (value.kind) {
    case ArgumentValue::Kind::kAbsent: return false;
    case ArgumentValue::Kind::kTensors: return value.tensors.count > 0;
    default: return true;
  }
}

std::string name_of(ScalarType type) {
  switch (type) {
    case at::kFloat: return "float32";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kDouble: return "float64";
    case at::kChar: return "int8";
    case at::kByte: return "uint8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kUInt16: return "uint16";
    case at::kUInt32: return "uint32";
    case at::kUInt64: return "uint64";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    case at::kBool: return "bool";
    case at::ScalarType::QUInt4x2: return "int4";
    default: return c10::toString(type);
  }
}

std::string sizes_of(const TensorView& view) {
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dims);
  return "[" + listed(sizes, digits, ", ") + "]";
}

std::string described(const TensorView& view) {
  const bool is_tiled = view.format == kFractal;
  return "sizes " + sizes_of(view) + " of " + name_of(view.dtype) +
         (is_tiled ? " in FRACTAL_NZ" : "");
}

std::string described(const ArgumentValue& value) {
  using Kind = ArgumentValue::Kind;
  switch (value.kind) {
    case Kind::kAbsent: return "null";
    case Kind::kTensor: return described(*value.tensor);
    case Kind::kTensors:
      return value.tensors.count == 0 ? "no tensor" : described(value.tensors[0]);
    case Kind::kIntegers: return "[" + listed(*value.integers, digits, ", ") + "]";
    case Kind::kInteger: return "value " + digits(value.integer);
    case Kind::kReal: return "value " + std::to_string(value.real);
    case Kind::kScalar: return "a number of " + name_of(value.scalar->dtype);
    case Kind::kText: return "value '" + *value.text + "'";
    default: return "values";
  }
}

std::string beside(const RuleArguments& own, const std::vector<const char*>& names) {
  std::string all;
  for (size_t i = 0; i < names.size(); ++i) {
    all += std::string(i == 0 ? " beside " : ", ") + names[i] + " " + described(own[i + 1]);
  }
  return all;
}

int64_t size_of(const TensorView& view, int dimension) {
  const int index = dimension < 0 ? view.dims + dimension : dimension;
  return index >= 0 && index < view.dims ? view.sizes[index] : 1;
}

// --- rules ---------------------------------------------------------------------------------------

Check Check::when(Condition condition) && {
  const size_t own = names.size() + 1;
  names.insert(names.end(), condition.names.begin(), condition.names.end());
  text += " when " + condition.text;
  form.clear();
  // A condition's arguments may be null, which it checks itself; the rule's own may not.
  const bool sees = sees_absence;
  sees_absence = true;
  find = [own, sees, holds = std::move(condition.holds),
          find = std::move(find)](const RuleArguments& arguments) -> Found {
    if (!sees) {
      for (size_t i = 0; i < own; ++i) {
        if (!arguments.has(i)) return std::nullopt;
      }
    }
    return holds(arguments.after(own)) ? find(arguments) : std::nullopt;
  };
  return std::move(*this);
}

Checks when(const Condition& condition, Checks checks) {
  for (Check& check : checks) check = std::move(check).when(condition);
  return checks;
}

std::vector<Rule> joined(std::vector<Rule> first, const std::vector<Rule>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<Row> rows_of(const Rules& rules) {
  std::vector<Row> rows;
  for (const Rule& rule : rules.list) {
    const char* const source = rule.source == nullptr ? rules.source : rule.source;
    std::istringstream arguments(rule.arguments);
    for (std::string argument; std::getline(arguments >> std::ws, argument, ',');) {
      for (const Check& check : rule.checks) rows.push_back({argument, check, source, rule.scope});
    }
  }
  return rows;
}

Check between(int64_t least, int64_t most) {
  return formed(that("be " + std::to_string(least) +
                         (most == kNoMost ? " or more" : " to " + std::to_string(most)),
                     {},
                     [=](const RuleArguments& own) {
                       return own.integer() >= least && own.integer() <= most;
                     }),
                form_of("between", digits(least) + ", " + digits(most)));
}

Check one_of(std::vector<int64_t> allowed) {
  std::string form = form_of("one_of", "[" + listed(allowed, digits, ", ") + "]");
  std::string text = "be " + listed(allowed, digits);
  return formed(that(std::move(text), {},
                     [allowed = std::move(allowed)](const RuleArguments& own) {
                       return contains(allowed, own.integer());
                     }),
                std::move(form));
}

Check one_of(std::vector<std::string> allowed) {
  std::string form = form_of("one_of", "[" + listed(allowed, in_quotes, ", ") + "]");
  std::string text =
      "be " + listed(allowed, [](const std::string& each) { return "'" + each + "'"; });
  return formed(fits(std::move(text), {},
                     [allowed = std::move(allowed)](const RuleArguments& own) {
                       return contains(allowed, own.text());
                     }),
                std::move(form));
}

Check that(std::string text, std::vector<const char*> names, Find find) {
  return {.text = std::move(text), .names = std::move(names), .find = std::move(find)};
}

Check that(std::string text, std::vector<const char*> names, Holds holds) {
  const auto find = [names, holds = std::move(holds)](const RuleArguments& own) -> Found {
    if (holds(own)) return std::nullopt;
    return described(own[0]) + beside(own, names);
  };
  return that(std::move(text), std::move(names), Find(find));
}

// --- conditions ----------------------------------------------------------------------------------

Condition is_given(const char* argument) {
  return {std::string(argument) + " is given", {argument}, [](const RuleArguments& own) {
            return given(own, 0);
          }};
}

Condition is_missing(const char* argument) {
  return {std::string(argument) + " is null", {argument}, [](const RuleArguments& own) {
            return !given(own, 0);
          }};
}

Condition equals(const char* argument, std::vector<std::string> texts) {
  return {std::string(argument) + " is " + listed(texts, [](const std::string& t) { return t; }),
          {argument},
          [texts](const RuleArguments& own) { return own.has() && contains(texts, own.text()); }};
}

Condition equals(const char* argument, std::vector<int64_t> numbers) {
  return {std::string(argument) + " is " + listed(numbers, digits),
          {argument},
          [numbers](const RuleArguments& own) { return contains(numbers, own.integer()); }};
}

Condition has_dtype(const char* argument, std::vector<ScalarType> dtypes) {
  return {std::string(argument) + " is " + listed(dtypes, name_of),
          {argument},
          [dtypes](const RuleArguments& own) {
            return own.has() && contains(dtypes, own.tensor().dtype);
          }};
}

Condition both(Condition first, Condition second) {
  const size_t count = first.names.size();
  std::vector<const char*> names = first.names;
  names.insert(names.end(), second.names.begin(), second.names.end());
  return {first.text + " and " + second.text, std::move(names),
          [count, one = std::move(first.holds), two = std::move(second.holds)](
              const RuleArguments& own) { return one(own) && two(own.after(count)); }};
}

}  // namespace vnpu::ops
