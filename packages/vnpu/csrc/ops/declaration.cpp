#include "ops/declaration.h"

#include <sstream>

#include "ops/parameters.h"

namespace vnpu::ops {
namespace {

// Set before any constructor runs, as the operators of other files may come first.
constinit const Operator* newest_operator = nullptr;

}  // namespace

Operator::Operator(const char* name, const char* parameters, Declaration (*declare)())
    : name(name), parameters(parameters), before(newest_operator), declare_(declare) {
  newest_operator = this;
}

const Operator* Operator::newest() { return newest_operator; }

const Declaration& Operator::declared() const {
  std::call_once(declared_once_, [this] { declared_ = declare_(); });
  return declared_;
}

const std::vector<std::string>& Operator::names() const {
  std::call_once(named_, [this] { names_ = parameter_names(parameters); });
  return names_;
}

const Operator* operator_named(const std::string& name) {
  const Operator* each = newest_operator;
  while (each != nullptr && each->name != name) each = each->before;
  return each;
}

const char* text_of(Tier tier) {
  switch (tier) {
    case kT1: return "T1";
    case kT2: return "T2";
    case kT3: return "T3";
    case kOther: break;
  }
  return "-";
}

std::string listed_operators() {
  std::ostringstream out;
  for (const Operator* each = newest_operator; each != nullptr; each = each->before) {
    out << "{\"operator\": \"" << each->name << "\", \"tier\": \"" << text_of(each->declared().tier)
        << "\", \"priced\": " << (each->declared().cost != nullptr ? "true" : "false")
        << ", \"arguments\": \"" << each->parameters << "\"}\n";
  }
  return out.str();
}

}  // namespace vnpu::ops
