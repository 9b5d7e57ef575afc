// Expands op_table.inc: schemas, functions for the NPU, functions for meta tensors, and names.

#include "registration.h"

#include <torch/library.h>

#include <iterator>
#include <map>
#include <sstream>

#include "operators/operators.h"

namespace davinci {

std::vector<std::string> operator_names() {
  return {
#define OP(NAME, LAUNCHES, RETURNS, ...) #NAME,
#include "op_table.inc"
#undef OP
  };
}

std::vector<std::string> launches(const std::string& name) {
  static const std::map<std::string, std::string> all = {
#define OP(NAME, LAUNCHES, RETURNS, ...) {#NAME, LAUNCHES},
#include "op_table.inc"
#undef OP
  };
  std::istringstream names(all.at(name));
  return {std::istream_iterator<std::string>(names), {}};
}

}  // namespace davinci

TORCH_LIBRARY(vllm_davinci, library) {
#define OP(NAME, LAUNCHES, RETURNS, ...) library.def(#NAME "(" __VA_ARGS__ ") -> " RETURNS);
#include "op_table.inc"
#undef OP
}

TORCH_LIBRARY_IMPL(vllm_davinci, PrivateUse1, library) {
#define OP(NAME, LAUNCHES, RETURNS, ...) library.impl(#NAME, TORCH_FN(davinci::npu::NAME));
#include "op_table.inc"
#undef OP
}

TORCH_LIBRARY_IMPL(vllm_davinci, Meta, library) {
#define OP(NAME, LAUNCHES, RETURNS, ...) library.impl(#NAME, TORCH_FN(davinci::meta::NAME));
#include "op_table.inc"
#undef OP
}
