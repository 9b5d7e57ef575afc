#pragma once

// Rows of operators whose body is one ATen function, by their arguments.

#include "ops/operator.h"

#define VNPU_UNARY(NAME, FUNCTION_OUT, ...)                         \
  VNPU_OPERATOR(NAME, (const Tensor& self, Out out), __VA_ARGS__) { \
    FUNCTION_OUT(out.tensor, self);                                 \
  }
#define VNPU_UNARY_INPLACE(NAME, FUNCTION_OUT, ...) \
  VNPU_OPERATOR(NAME, (InOut self), __VA_ARGS__) { FUNCTION_OUT(self.tensor, self.tensor); }

#define VNPU_TENSOR_TENSOR(NAME, FUNCTION_OUT, ...)                                      \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Tensor& other, Out out), __VA_ARGS__) { \
    FUNCTION_OUT(out.tensor, self, other);                                               \
  }
#define VNPU_TENSOR_SCALAR(NAME, FUNCTION_OUT, ...)                                      \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Scalar& other, Out out), __VA_ARGS__) { \
    FUNCTION_OUT(out.tensor, self, number(other));                                       \
  }
#define VNPU_INPLACE_TENSOR(NAME, FUNCTION_OUT, ...)                    \
  VNPU_OPERATOR(NAME, (InOut self, const Tensor& other), __VA_ARGS__) { \
    FUNCTION_OUT(self.tensor, self.tensor, other);                      \
  }
#define VNPU_INPLACE_SCALAR(NAME, FUNCTION_OUT, ...)                    \
  VNPU_OPERATOR(NAME, (InOut self, const Scalar& other), __VA_ARGS__) { \
    FUNCTION_OUT(self.tensor, self.tensor, number(other));              \
  }

// With a factor of `other`.
#define VNPU_SUM_TENSOR(NAME, FUNCTION_OUT, ...)                                               \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Tensor& other, const Scalar& alpha, Out out), \
                __VA_ARGS__) {                                                                 \
    FUNCTION_OUT(out.tensor, self, other, alpha);                                              \
  }
#define VNPU_SUM_SCALAR(NAME, FUNCTION_OUT, ...)                                               \
  VNPU_OPERATOR(NAME, (const Tensor& self, const Scalar& other, const Scalar& alpha, Out out), \
                __VA_ARGS__) {                                                                 \
    FUNCTION_OUT(out.tensor, self, number(other), alpha);                                      \
  }
