#pragma once

#include <pybind11/pybind11.h>

namespace vnpu {

// The Python view of the timing model.
void bind_timing(pybind11::module_& module);

}  // namespace vnpu
