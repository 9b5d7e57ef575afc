#include "abi/hccl/communicator_settings.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>
#include <vector>

#include "device/checked_sizes.h"
#include "device/failure.h"

namespace vnpu::abi {
namespace {

// HCCL_BUFFSIZE: MiB, at least 1. Source: HCCL's documentation, environment variables.
uint64_t buffer_bytes_of_environment() {
  constexpr uint64_t kDefaultMib = 200;
  const char* const text = std::getenv("HCCL_BUFFSIZE");
  if (text == nullptr || *text == '\0') return kDefaultMib << 20;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text, &end, 10);
  if (*end != '\0' || number < 1 || *text == '-') {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: HCCL_BUFFSIZE='") + text +
                      "' is not valid. Expected a number of MiB, at least 1.");
  }
  return checked_multiply<uint64_t>(number, uint64_t{1} << 20, "HCCL_BUFFSIZE in bytes");
}

// Splits "a;b" at ';' into {"a", "b"}; empty parts are kept.
std::vector<std::string_view> parts_of(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t at = 0;;) {
    const size_t end = text.find(separator, at);
    parts.push_back(text.substr(at, end == text.npos ? text.npos : end - at));
    if (end == text.npos) return parts;
    at = end + 1;
  }
}

// "level0:NA;level1:NHR", each level at most once. fullmesh is not documented; torch_npu's tests
// use it.
bool is_algorithm(std::string_view text) {
  using Names = std::set<std::string_view>;
  static const std::array<Names, 3> kLevels = {
      Names{"NA", "fullmesh"},
      Names{"ring", "H-D_R", "NHR", "NHR_V1", "NB", "AHC", "pipeline", "pairwise", "fullmesh"},
      Names{"ring", "H-D_R", "NHR", "NB", "pipeline"}};
  std::set<std::string_view> seen;
  for (const std::string_view part : parts_of(text, ';')) {
    const size_t colon = part.find(':');
    if (colon == part.npos) return false;
    const std::string_view level = part.substr(0, colon);
    if (level.size() != 6 || level.substr(0, 5) != "level" || !seen.insert(level).second) {
      return false;
    }
    const size_t number = static_cast<size_t>(level[5] - '0');
    if (number >= kLevels.size() || kLevels[number].count(part.substr(colon + 1)) == 0) {
      return false;
    }
  }
  return true;
}

// One algorithm for all operations or, separated by '/', for some operations. The choice makes no
// difference here. Source: HCCL's documentation, environment variables, HCCL_ALGO; a communicator's
// hcclAlgo has the same form.
void check_algorithms(std::string text, const char* of) {
  static const std::set<std::string_view> kOperations = {
      "allgather", "reducescatter", "allreduce", "broadcast", "reduce", "scatter", "alltoall"};
  std::erase(text, ' ');
  if (text.empty()) return;
  const std::vector<std::string_view> parts = parts_of(text, '/');
  const bool known = std::all_of(parts.begin(), parts.end(), [&](std::string_view part) {
    const size_t equals = part.find('=');
    if (equals == part.npos) return parts.size() == 1 && is_algorithm(part);
    return kOperations.count(part.substr(0, equals)) > 0 && is_algorithm(part.substr(equals + 1));
  });
  if (known) return;
  if (text.size() > 100) text = text.substr(0, 100) + "...";
  throw Failure(FailureKind::kInvalidArgument,
                std::string("vnpu: ") + of + "='" + text +
                    "' is not valid. Expected level0:NA;level1:ALGORITHM, or for each operation "
                    "OPERATION=level0:NA;level1:ALGORITHM/..., for example "
                    "allreduce=level0:NA;level1:ring/allgather=level0:NA;level1:H-D_R.");
}

}  // namespace

CommunicatorSettings::CommunicatorSettings(const HcclCommConfig* config)
    : limits(TimeLimits::from_environment()), buffer_bytes(buffer_bytes_of_environment()) {
  if (const char* const text = std::getenv("HCCL_ALGO")) check_algorithms(text, "HCCL_ALGO");
  if (config == nullptr) return;
  size_t size = 0;
  std::memcpy(&size, config->reserved, sizeof(size));
  if (size >= offsetof(HcclCommConfig, hcclCommName) + sizeof(config->hcclCommName)) {
    name.assign(config->hcclCommName,
                ::strnlen(config->hcclCommName, sizeof(config->hcclCommName)));
  }
  if (size >= offsetof(HcclCommConfig, hcclExecTimeOut) + sizeof(config->hcclExecTimeOut) &&
      config->hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET &&
      config->hcclExecTimeOut >= 0) {
    limits.execute = std::chrono::seconds(config->hcclExecTimeOut);
  }
  if (size >= offsetof(HcclCommConfig, hcclBufferSize) + sizeof(config->hcclBufferSize) &&
      config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) {
    buffer_bytes = uint64_t{config->hcclBufferSize} << 20;
  }
  if (size >= offsetof(HcclCommConfig, hcclAlgo) + sizeof(config->hcclAlgo)) {
    check_algorithms(
        std::string(config->hcclAlgo, ::strnlen(config->hcclAlgo, sizeof(config->hcclAlgo))),
        "hcclAlgo");
  }
}

}  // namespace vnpu::abi
