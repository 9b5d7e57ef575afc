#pragma once

namespace vnpu {

// From now on a process that follows a device address says so before it ends by SIGSEGV; every
// other fault goes to the handler that was there before.
void report_host_touches();

}  // namespace vnpu
