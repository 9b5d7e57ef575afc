#pragma once

#include <pybind11/pybind11.h>

namespace vnpu {

// Python bindings that load and launch Triton kernels.
void bind_triton(pybind11::module_& module);

}  // namespace vnpu
