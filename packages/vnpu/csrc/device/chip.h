#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace vnpu {

// Families of chips that CANN's documents tell apart. Bits, so that a rule can name several.
enum class Generation : unsigned { kOther = 0, kA2 = 1, kA3 = 2, k310P = 4, k310B = 8, k910 = 16 };

// Releases of CANN whose documents the operators follow, in their order.
enum class CannRelease : uint8_t { k8_3, k8_5, k9_0 };

// Numbers that a chip accepts: a list or, if the list is empty, a range with a step.
struct AllowedNumbers {
  std::vector<int64_t> listed = {};
  int64_t least = 0, most = 0, step = 1;

  bool has(int64_t number) const;
  std::string text() const;  // "16, 32", "2 to 768", "32 to 7168, multiples of 32"
};

// Limits of the fused launches that dispatch tokens to experts and combine their results.
struct FusedExperts {
  AllowedNumbers ranks;
  AllowedNumbers hidden_sizes;
  int64_t max_tokens;  // of a rank
  // Up to CANN 8.5; later releases have the same limits on every chip.
  int64_t max_experts, max_local_experts;
  bool shared_expert_ranks;  // whether ranks of their own can have the shared experts
  bool weights_at_dispatch;  // whether the experts' weights travel with the rows
};

// Properties of a chip. The rows are generated from src/vllm_davinci/vnpu/timing/chips/*.toml.
struct Chip {
  const char* name;        // of its file
  const char* soc_prefix;  // prefix of its SoC names
  Generation generation;
  CannRelease cann;  // release that comes with it
  size_t memory_bytes;
  uint32_t cube_cores;
  uint32_t vector_cores;
  int64_t l2_bytes;
  int streams;  // maximum per device
  int events;   // maximum per device
  int server_devices;
  std::optional<FusedExperts> fused_experts = {};  // nullopt: no fused launches
};

// The chip of a SoC name, "Ascend910B3". Throws kInvalidArgument for a name that no row has.
const Chip& chip_of(std::string_view soc);

}  // namespace vnpu
