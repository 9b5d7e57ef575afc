#pragma once

#include <pybind11/pybind11.h>

namespace vnpu {

// How Python loads and launches Triton kernels.
void bind_triton(pybind11::module_& module);

}  // namespace vnpu
