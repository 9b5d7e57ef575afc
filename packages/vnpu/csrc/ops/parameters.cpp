#include "ops/parameters.h"

#include <algorithm>
#include <cctype>

namespace vnpu::ops {

std::string plain_name(std::string_view name) {
  std::string result;
  for (const char c : name) {
    if (c != '_') result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

std::vector<std::string> parameter_names(std::string_view parameters) {
  std::vector<std::string> names;
  std::string_view rest = parameters;
  if (!rest.empty() && rest.front() == '(') rest = rest.substr(1, rest.rfind(')') - 1);
  const auto is_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  };
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    std::string_view parameter = rest.substr(0, comma);
    while (!parameter.empty() && !is_word(parameter.back()) && parameter.back() != '&') {
      parameter.remove_suffix(1);
    }
    size_t begin = parameter.size();
    while (begin > 0 && is_word(parameter[begin - 1])) --begin;
    std::string_view before = parameter.substr(0, begin);
    while (!before.empty() && before.back() == ' ') before.remove_suffix(1);
    // A parameter that is only a type has no name.
    const bool is_type = before.empty() || before == "const";
    names.emplace_back(is_type ? std::string() : plain_name(parameter.substr(begin)));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return names;
}

}  // namespace vnpu::ops
