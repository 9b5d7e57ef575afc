#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "race/vector_clock.h"

namespace vnpu::race {

// Description of one side of a race, for reports.
struct Launch {
  const char* task;
  int stream;
  uint64_t number;  // on its stream, from 1
  std::string call_site;
  VectorClock known;  // work known to have finished at its launch, itself included

  // "memory copy on stream 3, launched at ..."
  std::string describe() const {
    return std::string(task) + " on stream " + std::to_string(stream) + ", launched at" +
           (call_site.empty() ? "\n      (no Python frame)" : call_site);
  }
};

using LaunchPtr = std::shared_ptr<const Launch>;

}  // namespace vnpu::race
