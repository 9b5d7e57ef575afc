#include "ops/group_operator.h"

#include "collective/group_registry.h"
#include "device/system.h"

namespace vnpu::ops {

void reject(const Launch& launch, const std::string& message) {
  throw Failure(FailureKind::kOperatorInvalid, std::string(launch.name) + ": " + message);
}

GroupPtr group_named(const Launch& launch, const std::string& name) {
  const int device = System::instance().require_current_device();
  GroupPtr group = find_group(name, device);
  if (group == nullptr) {
    reject(launch, "device " + std::to_string(device) + " takes part in no group '" + name +
                       "'. Pass the name that HcclGetCommName gives (get_hccl_comm_name of the "
                       "process group's backend), after the group's communicator was made.");
  }
  return group;
}

}  // namespace vnpu::ops
