#pragma once

#include <string>
#include <vector>

namespace davinci {

// The operators of op_table.inc, in its order.
std::vector<std::string> operator_names();
// The operators of CANN that the operator `name` launches, without "aclnn".
std::vector<std::string> launches(const std::string& name);

}  // namespace davinci
