#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace vnpu::race {

// What a report says about one side of a race.
struct Launch {
  const char* task;
  int stream;
  uint64_t number;  // on its stream, from 1
  std::string call_site;

  // "memory copy on stream 3, launched at ..."
  std::string describe() const {
    return std::string(task) + " on stream " + std::to_string(stream) + ", launched at" +
           (call_site.empty() ? "\n      (no Python frame)" : call_site);
  }
};

using LaunchPtr = std::shared_ptr<const Launch>;

}  // namespace vnpu::race
