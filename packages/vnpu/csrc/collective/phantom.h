#pragma once

namespace vnpu {

// Whether the other ranks of all groups are phantoms [VNPU_PHANTOM_RANKS: 1]: nobody else joins,
// and a collective waits for nobody and moves nothing. Throws Failure where operators compute
// [VNPU_COMPUTE], since what phantoms send is not there.
bool ranks_are_phantoms();

}  // namespace vnpu
