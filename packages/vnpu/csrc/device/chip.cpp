#include "device/chip.h"

#include <algorithm>

#include "device/failure.h"

namespace vnpu {
namespace {

const std::vector<Chip>& chips() {
  // Used by what ends with the process. The longest prefix comes first.
  static const auto* const all = new std::vector<Chip>{
#include "device/chips.inc"
  };
  return *all;
}

}  // namespace

bool AllowedNumbers::has(int64_t number) const {
  if (!listed.empty()) return std::find(listed.begin(), listed.end(), number) != listed.end();
  return number >= least && number <= most && number % step == 0;
}

std::string AllowedNumbers::text() const {
  std::string text;
  for (const int64_t number : listed) text += (text.empty() ? "" : ", ") + std::to_string(number);
  if (!listed.empty()) return text;
  text = std::to_string(least) + " to " + std::to_string(most);
  return step == 1 ? text : text + ", multiples of " + std::to_string(step);
}

const Chip& chip_of(std::string_view soc) {
  for (const Chip& chip : chips()) {
    if (soc.starts_with(chip.soc_prefix)) return chip;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: no chip has the SoC name '" + std::string(soc) +
                    "'. Names begin with Ascend, as in Ascend910B3.");
}

}  // namespace vnpu
