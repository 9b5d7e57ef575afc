#pragma once

// One call of the older interface (aclop), which libacl_op_compiler passes to the operators.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace vnpu::abi {

// A tensor as aclTensorDesc and aclDataBuffer describe it.
struct LegacyTensor {
  void* data;
  int32_t dtype;   // aclDataType; negative: none is given
  int32_t format;  // aclFormat in which it lies in memory
  std::vector<int64_t> sizes;
  std::vector<int64_t> storage_sizes;  // in that format
  bool on_host;
};

using LegacyAttribute =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;
using LegacyAttributes = std::map<std::string, LegacyAttribute>;

struct LegacyCall {
  const char* type;
  std::vector<LegacyTensor> inputs;
  std::vector<LegacyTensor> outputs;
  LegacyAttributes attributes;
};

// `vnpuRunLegacy` of libopapi: launches the call on a stream. Returns an aclError, or
// kNoSuchOperator if no operator has the call's type.
using RunLegacy = int(const LegacyCall& call, void* stream);
inline constexpr int kNoSuchOperator = -1;

}  // namespace vnpu::abi
