#include "timing/simulation.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/failure.h"
#include "timing/resources.h"

namespace vnpu::timing {
namespace {

constexpr size_t kCube = index_of(Resource::kCube);
constexpr size_t kHbm = index_of(Resource::kHbm);

PlanPtr plan(std::vector<Phase> phases, const void* turn = nullptr) {
  auto made = std::make_shared<Plan>();
  made->name = "task";
  made->phases = std::move(phases);
  made->turn = turn;
  return made;
}

Phase work(Time fixed, std::map<Resource, Time> busy) {
  Phase phase;
  phase.fixed = fixed;
  for (const auto& [resource, time] : busy) phase.busy[index_of(resource)] = time;
  return phase;
}

TEST(Speeds, ATaskAloneRunsAtFullSpeed) {
  Busy busy = {};
  busy[kHbm] = 10;
  busy[kCube] = 3;
  const Shares shares = shares_of({.busy = busy});
  EXPECT_EQ(shares[kHbm], kWhole);
  std::vector<uint64_t> speeds;
  speeds_of({&shares}, speeds);
  EXPECT_EQ(speeds, std::vector<uint64_t>{kWhole});
}

TEST(Speeds, WhoDoesNotUseWhatIsUsedUpRunsOn) {
  Shares all_memory = {};
  all_memory[kHbm] = kWhole;
  Shares half_memory = {};
  half_memory[kHbm] = kWhole / 2;
  half_memory[kCube] = kWhole;
  Shares links = {};
  links[index_of(Resource::kLinks0)] = kWhole;
  std::vector<uint64_t> speeds;
  speeds_of({&all_memory, &half_memory, &links}, speeds);
  // 1.5 of memory is asked for: both get 2 / 3 of their speed.
  EXPECT_EQ(speeds[0], kWhole * 2 / 3);
  EXPECT_EQ(speeds[1], speeds[0]);
  EXPECT_EQ(speeds[2], kWhole);
}

TEST(Simulation, WhereItStopsOnTheWayHasNoInfluence) {
  const auto ends = [](Time step) {
    std::vector<Time> times;
    Simulation simulation([&](const Span& span) { times.push_back(span.end); });
    for (int i = 0; i < 12; ++i) {
      const Time launched = 37 * i;
      if (step != 0) {
        for (Time at = simulation.now(); at < launched; at += step) simulation.advance(at);
      }
      simulation.launch(
          0, i % 3,
          plan({work(i * 3, {{Resource::kHbm, 91 + 17 * i},
                             {i % 2 == 0 ? Resource::kCube : Resource::kVector, 77}})}),
          launched);
    }
    simulation.finish_device(0);
    return times;
  };
  const std::vector<Time> whole = ends(0);
  EXPECT_EQ(whole.size(), 12U);
  EXPECT_EQ(ends(1), whole);
  EXPECT_EQ(ends(13), whole);
}

TEST(Simulation, AWaitThatNothingEndsIsToldWithItsStream) {
  Simulation simulation;
  const uint64_t record = 1;
  simulation.wait(0, 2, record + 0, nullptr, 0);
  const uint64_t later = simulation.record(0, 2, nullptr, 0);
  EXPECT_EQ(later, record);  // the stream waits for what follows on itself
  try {
    simulation.finish_stream(2);
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("stream 2 waits at record 1"), std::string::npos);
  }
}

}  // namespace
}  // namespace vnpu::timing
