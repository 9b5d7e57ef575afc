#include "device/touched.h"

namespace vnpu {

bool Touched::keeps_accesses = false;

}  // namespace vnpu
