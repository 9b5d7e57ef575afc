#pragma once

// The names of an operator's arguments, as its row spells them.

#include <string>
#include <string_view>
#include <vector>

namespace vnpu::ops {

// Without `_` and capitals, because documents and rows spell names differently.
std::string plain_name(std::string_view name);
// The names in "(const Tensor& key, const Text&)", plain: key, and nothing.
std::vector<std::string> parameter_names(std::string_view parameters);

}  // namespace vnpu::ops
