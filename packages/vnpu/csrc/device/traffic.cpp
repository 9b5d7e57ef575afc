#include "device/traffic.h"

namespace vnpu {

uint64_t bytes_of(const Access& access) {
  if (access.layout.dims == 0) return access.end - access.begin;
  auto bytes = static_cast<uint64_t>(access.layout.item);
  for (int i = 0; i < access.layout.dims; ++i) {
    bytes *= static_cast<uint64_t>(access.layout.sizes[i]);
  }
  return bytes;
}

Traffic traffic_of(const Task& task) {
  Traffic traffic;
  for (const Access& access : task.touched.accesses()) {
    (access.write ? traffic.written : traffic.read) += bytes_of(access);
  }
  return traffic;
}

}  // namespace vnpu
