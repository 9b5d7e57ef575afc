#pragma once

// How rules state their conditions, in words and in the forms that programs read.

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ops/rules.h"

namespace vnpu::ops {

inline constexpr int64_t kNoMost = std::numeric_limits<int64_t>::max();

template <class List, class Text>
std::string listed(const List& list, Text text, const char* last = " or ") {
  std::string result;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i > 0) result += i + 1 == list.size() ? last : ", ";
    result += text(list[i]);
  }
  return result;
}

inline std::string digits(int64_t value) { return std::to_string(value); }

inline std::string in_quotes(const std::string& text) { return '"' + text + '"'; }
inline std::string quoted_dtype(ScalarType type) { return in_quotes(name_of(type)); }

inline std::string form_of(const std::string& kind, const std::string& values = "") {
  return "[" + in_quotes(kind) + (values.empty() ? "" : ", ") + values + "]";
}

inline Check formed(Check check, std::string form) {
  check.form = std::move(form);
  return check;
}

template <class T>
bool contains(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

// The value of an argument as refusals print it: "sizes [2, 3] of float16".
std::string described(const TensorView& view);
std::string described(const ArgumentValue& value);
// The values of a rule's other arguments: " beside x sizes [4] of int8, axis value 1".
std::string beside(const RuleArguments& own, const std::vector<const char*>& names);

inline std::string dimension_text(int dimension) {
  return dimension == -1 ? "last dimension" : "dimension " + std::to_string(dimension);
}

inline std::string multiple_text(int64_t multiple) {
  return multiple == 1 ? "" : " and a multiple of " + std::to_string(multiple);
}

// True if an argument is present, and is not empty if it is a tensor or a list.
inline bool given(const RuleArguments& own, size_t index) {
  if (!own.has(index)) return false;
  const ArgumentValue& value = own[index];
  if (value.kind == ArgumentValue::Kind::kTensor) return value.tensor->numel() > 0;
  if (value.kind != ArgumentValue::Kind::kTensors) return true;
  for (size_t i = 0; i < value.tensors.count; ++i) {
    if (value.tensors[i].numel() > 0) return true;
  }
  return false;
}

}  // namespace vnpu::ops
