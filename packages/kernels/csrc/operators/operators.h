#pragma once

// From op_table.inc, for each operator: a struct of its arguments, and the function that computes
// it. Shapes and meaning: `vllm_davinci.operators`.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <optional>
#include <tuple>

namespace davinci {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
// A tuple of `count` elements.
template <size_t count>
using Tensors = decltype(std::tuple_cat(std::array<Tensor, count>()));

namespace arguments {

#define ARGUMENT(TYPE, NAME, SCHEMA) TYPE NAME;
#define OPERATOR(NAME, LAUNCHES, RETURNS, ARGUMENTS) \
  struct NAME {                                      \
    ARGUMENTS                                        \
  };
#include "op_table.inc"

}  // namespace arguments

// Each checks what aclnn does not check, makes the tensors that it returns and, unless it got meta
// tensors, launches on the current stream.
#define ARGUMENT(TYPE, NAME, SCHEMA)
#define OPERATOR(NAME, LAUNCHES, RETURNS, ARGUMENTS) RETURNS NAME(const arguments::NAME& a);
#include "op_table.inc"

}  // namespace davinci
