#pragma once

// Tests that run under every schedule.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "device/executor.h"
#include "tasks.h"

namespace vnpu::tests {

struct Policy {
  const char* name;
  SchedulePolicy policy;
  uint64_t seed;
};
inline constexpr Policy kPolicies[] = {{"eager", SchedulePolicy::kEager, 0},
                                       {"threads", SchedulePolicy::kThreads, 0},
                                       {"fuzz1", SchedulePolicy::kFuzz, 1},
                                       {"fuzz2", SchedulePolicy::kFuzz, 2}};
inline std::string name_of_policy(const ::testing::TestParamInfo<Policy>& info) {
  return info.param.name;
}

class Schedules : public ::testing::TestWithParam<Policy> {
 protected:
  Executor& executor = make_executor(GetParam().policy, GetParam().seed);
  StreamPtr a = executor.create_stream(0, 0);
  StreamPtr b = executor.create_stream(0, 0);
};

}  // namespace vnpu::tests
