#include "ops/vector_width.h"

#include <ATen/Version.h>

#include <string>

namespace vnpu::ops {

int vector_floats() {
  static const int floats = [] {
    const std::string capability = at::get_cpu_capability();
    return capability == "AVX512" ? 16 : capability == "AVX2" ? 8 : 4;
  }();
  return floats;
}

}  // namespace vnpu::ops
