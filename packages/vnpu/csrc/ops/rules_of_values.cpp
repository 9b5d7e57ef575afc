// Values of arguments as rules see them, rules about numbers and texts, and conditions.

#include "ops/rules.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "ops/rule_text.h"

namespace vnpu::ops {

// --- values --------------------------------------------------------------------------------------

const TensorView& RuleArguments::tensor(size_t index) const {
  const ArgumentValue& value = (*this)[index];
  // The rules of a list hold for each of its tensors; those that compare look at the first.
  return value.kind == ArgumentValue::Kind::kTensors ? value.tensors[0] : *value.tensor;
}

int64_t RuleArguments::count(size_t index) const {
  const ArgumentValue& value = (*this)[index];
  return value.kind == ArgumentValue::Kind::kScalars ? static_cast<int64_t>(value.scalars->size())
                                                     : value.tensors.count;
}

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
  // The condition's arguments may be null, which it then says itself; the rule's own may not.
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
                     [=](const RuleArguments& own) -> Found {
                       if (own.integer() >= least && own.integer() <= most) return std::nullopt;
                       return "value " + std::to_string(own.integer());
                     }),
                form_of("between", digits(least) + ", " + digits(most)));
}

Check one_of(std::vector<int64_t> allowed) {
  const std::string numbers = listed(allowed, digits, ", ");
  std::string text = "be " + listed(allowed, digits);
  return formed(
      that(std::move(text), {},
           [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
             if (std::find(allowed.begin(), allowed.end(), own.integer()) != allowed.end()) {
               return std::nullopt;
             }
             return "value " + std::to_string(own.integer());
           }),
      form_of("one_of", "[" + numbers + "]"));
}

Check one_of(std::vector<std::string> allowed) {
  const std::string texts = listed(allowed, in_quotes, ", ");
  std::string text =
      "be " + listed(allowed, [](const std::string& each) { return "'" + each + "'"; });
  return formed(fits(std::move(text), {},
                     [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
                       if (std::find(allowed.begin(), allowed.end(), own.text()) != allowed.end()) {
                         return std::nullopt;
                       }
                       return "value '" + own.text() + "'";
                     }),
                form_of("one_of", "[" + texts + "]"));
}

Check that(std::string text, std::vector<const char*> names,
           std::function<Found(const RuleArguments&)> find) {
  return {.text = std::move(text), .names = std::move(names), .find = std::move(find)};
}

Check fits(std::string text, std::vector<const char*> names,
           std::function<Found(const RuleArguments&)> find) {
  Check check = that(std::move(text), std::move(names), std::move(find));
  check.is_limit = false;
  return check;
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
          [texts](const RuleArguments& own) {
            return own.has() && std::find(texts.begin(), texts.end(), own.text()) != texts.end();
          }};
}

Condition equals(const char* argument, std::vector<int64_t> numbers) {
  return {std::string(argument) + " is " + listed(numbers, digits),
          {argument},
          [numbers](const RuleArguments& own) {
            return std::find(numbers.begin(), numbers.end(), own.integer()) != numbers.end();
          }};
}

Condition has_dtype(const char* argument, std::vector<ScalarType> dtypes) {
  return {std::string(argument) + " is " + listed(dtypes, name_of),
          {argument},
          [dtypes](const RuleArguments& own) {
            return own.has() &&
                   std::find(dtypes.begin(), dtypes.end(), own.tensor().dtype) != dtypes.end();
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
