#pragma once

#include "collective/group.h"

namespace vnpu {

// Devices of a server, in the order of their numbers [VNPU_SERVER_DEVICES]; without the variable as
// many as the chip's servers have.
int devices_per_server();

// Collectives of unequal parts: within one server on A3; on A2 also between servers that have
// equally many ranks. Throws kNotSupported, naming the function, for a group to which the chip's
// documents deny them. A reference chip, and phantom ranks, are denied none.
// Source: HCCL's documentation, HcclAllGatherV and HcclReduceScatterV, constraints.
void require_servers_for_unequal_parts(const Group& group, const char* function);

}  // namespace vnpu
