#include "device/capability.h"

#include <string>

#include "device/configuration.h"

namespace vnpu {
namespace {

// Of the SoC families, longest prefix first.
constexpr Capability kCapabilities[] = {
    {"Ascend910B1", 24, 48, int64_t{192} << 20},  {"Ascend910B2", 24, 48, int64_t{192} << 20},
    {"Ascend910B3", 20, 40, int64_t{192} << 20},  {"Ascend910B4", 20, 40, int64_t{96} << 20},
    {"Ascend910_93", 24, 48, int64_t{192} << 20}, {"Ascend310P", 8, 8, int64_t{16} << 20},
    {"Ascend", 20, 40, int64_t{192} << 20},
};

}  // namespace

const Capability& capability() {
  const std::string& soc = Configuration::instance().soc_name;
  for (const Capability& each : kCapabilities) {
    if (soc.rfind(each.soc_prefix, 0) == 0) return each;
  }
  return kCapabilities[0];
}

}  // namespace vnpu
