#pragma once

namespace vnpu {

// True if the other ranks of all groups are phantoms [VNPU_PHANTOM_RANKS: 1]: no other rank joins,
// and collectives neither wait nor move data. Throws Failure if operators compute [VNPU_COMPUTE],
// since phantoms send no data.
bool ranks_are_phantoms();

}  // namespace vnpu
