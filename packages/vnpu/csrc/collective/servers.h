#pragma once

#include "collective/group.h"

namespace vnpu {

// Devices of a server, in the order of their numbers [VNPU_SERVER_DEVICES]; without the variable as
// many as the chip's servers have.
int devices_per_server();

// Checks a group of collectives with unequal parts. A3 supports them within one server, A2 also
// across servers with equal numbers of ranks. Throws kNotSupported, naming the function, otherwise.
// A reference chip and phantom ranks always pass.
// Source: HCCL's documentation, HcclAllGatherV and HcclReduceScatterV, constraints.
void require_servers_for_unequal_parts(const Group& group, const char* function);

}  // namespace vnpu
