// Expands op_table.inc: schemas, functions for the NPU and for meta tensors, and names. The only
// file that includes torch/library.h, which takes as long to compile as all operators.

#include "registration.h"

#include <torch/library.h>

#include <iterator>
#include <map>
#include <sstream>

#include "host/block_fp8.h"
#include "operators/operators.h"

namespace davinci {
namespace {

// The function that torch's dispatcher calls with one C++ argument per operator argument.
template <auto function, class Arguments, class... Types>
struct Unpacked {
  static auto call(Types... values) { return function(Arguments{values...}); }
};

// A schema's result.
template <class Returns>
std::string result() {
  if constexpr (std::is_void_v<Returns>) {
    return "()";
  } else if constexpr (std::is_same_v<Returns, Tensor>) {
    return "Tensor";
  } else {
    std::string text = "(Tensor";
    for (size_t i = 1; i < std::tuple_size_v<Returns>; ++i) text += ", Tensor";
    return text + ")";
  }
}

// arguments: each one begins with ", ".
template <class Returns>
c10::FunctionSchema schema(const std::string& name, const std::string& arguments) {
  return torch::schema((name + "(" + arguments.substr(2) + ") -> " + result<Returns>()).c_str());
}

}  // namespace

std::vector<std::string> operator_names() {
  return {
#define ARGUMENT(TYPE, NAME, SCHEMA)
#define OPERATOR(NAME, LAUNCHES, RETURNS, ARGUMENTS) #NAME,
#include "op_table.inc"
  };
}

std::vector<std::string> launches(const std::string& name) {
  static const std::map<std::string, std::string> all = {
#define ARGUMENT(TYPE, NAME, SCHEMA)
#define OPERATOR(NAME, LAUNCHES, RETURNS, ARGUMENTS) {#NAME, LAUNCHES},
#include "op_table.inc"
  };
  std::istringstream names(all.at(name));
  return {std::istream_iterator<std::string>(names), {}};
}

TORCH_LIBRARY(vllm_davinci, library) {
#define ARGUMENT(TYPE, NAME, SCHEMA) ", " SCHEMA
#define OPERATOR(NAME, LAUNCHES, RETURNS, ARGUMENTS) library.def(schema<RETURNS>(#NAME, ARGUMENTS));
#include "op_table.inc"
  // Operators on host tensors.
  library.def(
      "block_fp8_floats(Tensor weight, Tensor scale, int block_rows, int block_columns, "
      "ScalarType dtype, Tensor[] spares) -> Tensor");
  library.def(
      "block_fp8_integers(Tensor weight, Tensor scale, int block_rows, int block_columns, "
      "Tensor[] spares) -> (Tensor, Tensor)");
}

namespace {

void implement(torch::Library& library) {
#define ARGUMENT(TYPE, NAME, SCHEMA) , TYPE
#define OPERATOR(NAME, LAUNCHES, RETURNS, ARGUMENTS) \
  library.impl(#NAME, TORCH_FN((Unpacked<&NAME, arguments::NAME ARGUMENTS>::call)));
#include "op_table.inc"
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_davinci, PrivateUse1, library) { implement(library); }
TORCH_LIBRARY_IMPL(vllm_davinci, Meta, library) { implement(library); }
TORCH_LIBRARY_IMPL(vllm_davinci, CPU, library) {
  library.impl("block_fp8_floats", TORCH_FN(block_fp8_floats));
  library.impl("block_fp8_integers", TORCH_FN(block_fp8_integers));
}

}  // namespace davinci
