#pragma once

#include <map>
#include <string>

#include "timing/machine.h"

namespace vnpu::tests {

using Changes = std::map<std::string, std::string>;

// A chip whose figures are round: 1 operation per ps, 1 byte per ps, no fixed times.
inline std::string figures(const Changes& changes = {}) {
  Changes values;
  for (const std::string& name : timing::Machine::figure_names()) {
    const bool is_time = name.ends_with("_static") || name.ends_with("_jitter") ||
                         name.starts_with("event_") || name == "graph_node" ||
                         name == "queue_change" || name.starts_with("host_");
    values[name] = is_time                    ? "0"
                   : name.ends_with("_share") ? "1000000"
                   : name == "cube_cores"     ? "24"
                   : name == "vector_cores"   ? "48"
                   : name == "queue_depth"    ? "1000"
                                              : "1000000000000";
  }
  values["tier0_ranks"] = "8";
  values["tier0_bandwidth"] = "1000000000000";
  values["tier0_share"] = "1000000";
  values["tier0_all_to_all_share"] = "1000000";
  values["tier0_latency"] = "0";
  for (const auto& [name, value] : changes) values[name] = value;
  std::string text;
  for (const auto& [name, value] : values) {
    if (!value.empty()) text += (text.empty() ? "" : ";") + name + "=" + value;
  }
  return text;
}

}  // namespace vnpu::tests
