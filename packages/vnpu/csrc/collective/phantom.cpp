#include "collective/phantom.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "device/configuration.h"
#include "device/failure.h"

namespace vnpu {

bool ranks_are_phantoms() {
  static const bool phantoms = [] {
    const char* value = std::getenv("VNPU_PHANTOM_RANKS");
    if (value == nullptr || *value == '\0' || std::strcmp(value, "0") == 0) return false;
    if (std::strcmp(value, "1") != 0) {
      throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: VNPU_PHANTOM_RANKS='") +
                                                       value + "' is not valid. Expected 0 or 1.");
    }
    if (Configuration::instance().compute) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: VNPU_PHANTOM_RANKS=1 needs VNPU_COMPUTE=0: what phantom ranks would "
                    "send is not there to compute with.");
    }
    return true;
  }();
  return phantoms;
}

}  // namespace vnpu
