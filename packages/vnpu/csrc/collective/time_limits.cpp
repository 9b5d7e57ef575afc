#include "collective/time_limits.h"

#include <cstdlib>
#include <string>

#include "device/failure.h"

namespace vnpu {
namespace {

constexpr long kLongest = 2147483647;  // seconds

void read(const char* name, long least, std::chrono::seconds& limit) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < least || value > kLongest) {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: ") + name + "='" + text +
                      "' is not valid. Expected a whole number of seconds, at least " +
                      std::to_string(least) + ".");
  }
  limit = std::chrono::seconds(value);
}

}  // namespace

TimeLimits TimeLimits::from_environment() {
  TimeLimits limits;
  read("HCCL_CONNECT_TIMEOUT", 1, limits.connect);
  read("HCCL_EXEC_TIMEOUT", 0, limits.execute);
  return limits;
}

}  // namespace vnpu
