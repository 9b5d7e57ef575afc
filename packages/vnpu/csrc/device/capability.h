#pragma once

#include <cstdint>

namespace vnpu {

// What the configured SoC has.
struct Capability {
  const char* soc_prefix;
  uint32_t cube_cores;
  uint32_t vector_cores;
  int64_t l2_bytes;
};

const Capability& capability();

}  // namespace vnpu
