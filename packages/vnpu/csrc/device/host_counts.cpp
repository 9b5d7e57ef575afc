#include "device/host_counts.h"

namespace vnpu {

HostCounts& HostCounts::instance() {
  static HostCounts counts;
  return counts;
}

}  // namespace vnpu
