#pragma once

// Checks calls against the rules of their operators' rows (ops/rules.h).

#include <string>

namespace vnpu::ops {

// All rows that are written down, one JSON object a line: operator, argument, rule, form, source,
// chips, since, until, status. Read by tests and by the page that lists them.
std::string listed_constraints();

}  // namespace vnpu::ops
