#include "collective/servers.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "collective/phantom.h"
#include "device/configuration.h"
#include "device/failure.h"

namespace vnpu {
namespace {

bool is_a3() { return Configuration::instance().chip->generation == Generation::kA3; }
bool is_a2() { return Configuration::instance().chip->generation == Generation::kA2; }

}  // namespace

int devices_per_server() {
  static const int devices = [] {
    const char* const value = std::getenv("VNPU_SERVER_DEVICES");
    if (value == nullptr || *value == '\0') return Configuration::instance().chip->server_devices;
    const std::string_view text = value;
    int number = 0;
    const auto [end, error] = std::from_chars(text.begin(), text.end(), number);
    if (error != std::errc() || end != text.end() || number < 1 || number > 64) {
      throw Failure(FailureKind::kInvalidArgument,
                    std::string("vnpu: VNPU_SERVER_DEVICES='") + value +
                        "' is not valid. Expected a number of devices from 1 to 64.");
    }
    return number;
  }();
  return devices;
}

void require_servers_for_unequal_parts(const Group& group, const char* function) {
  const Configuration& configuration = Configuration::instance();
  if (!configuration.strict || configuration.is_reference || ranks_are_phantoms()) return;
  if (!is_a3() && !is_a2()) return;
  std::map<std::pair<uint32_t, int>, uint32_t> ranks;  // by host, and by server in a supernode
  for (uint32_t r = 0; r < group.ranks(); ++r) {
    ++ranks[{group.host_of(r), group.device_of(r) / devices_per_server()}];
  }
  const bool is_even = std::all_of(ranks.begin(), ranks.end(), [&](const auto& server) {
    return server.second == ranks.begin()->second;
  });
  if (ranks.size() == 1 || (is_a2() && is_even)) return;
  std::string counts;
  for (const auto& [server, count] : ranks) {
    counts += (counts.empty() ? "" : ", ") + std::to_string(count);
  }
  throw Failure(FailureKind::kNotSupported,
                std::string("vnpu: ") + function + " in group " + group.name() +
                    ", whose servers have " + counts + " ranks: " + configuration.soc_name +
                    (is_a3() ? " has it within one server only"
                             : " has it between servers with equally many ranks only") +
                    ". Pad the parts, and gather or scatter equal ones. A server has " +
                    std::to_string(devices_per_server()) +
                    " devices (VNPU_SERVER_DEVICES). Source: HCCL's documentation, " + function +
                    ", constraints.");
}

}  // namespace vnpu
