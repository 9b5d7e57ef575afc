#include "timing/arrival.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <utility>

#include "timing/simulation.h"

namespace vnpu::timing {
namespace {

std::shared_ptr<Plan> task(Time fixed) {
  auto made = std::make_shared<Plan>();
  made->phases = {{.fixed = fixed}};
  return made;
}

// Takes 10; the last of its ranks is 100 late after one task.
PlanPtr collective(const void* turn) {
  auto made = task(10);
  made->kind = Kind::kCommunication;
  made->turn = turn;
  made->lateness = 100;
  return made;
}

// A simulation, and when its tasks begin and end by their labels.
struct Ends {
  std::map<uint32_t, std::pair<Time, Time>> times;  // begin and end
  Simulation simulation{[this](const Span& span) { times[span.label] = {span.begin, span.end}; }};
};

TEST(Arrivals, RanksThatHaveJustMetWaitForNobody) {
  const int turn = 0;
  Ends ends;
  for (uint32_t i = 0; i < 4; ++i) ends.simulation.launch(0, 1, task(7), 0, i);
  ends.simulation.launch(0, 1, collective(&turn), 0, 4);
  ends.simulation.launch(0, 1, collective(&turn), 0, 5);
  ends.simulation.finish_device(0);
  EXPECT_EQ(ends.times[4], std::pair(Time{28}, Time{28 + 200 + 10}));  // twice as far as after one
  EXPECT_EQ(ends.times[5], std::pair(Time{238}, Time{248}));
}

TEST(Arrivals, WhoWaitsForSomethingElseHasUsedTheTime) {
  const int turn = 0;
  Ends ends;
  ends.simulation.launch(0, 1, task(7), 0, 0);
  const uint64_t computed = ends.simulation.record(0, 1, nullptr, 0);
  ends.simulation.launch(0, 2, collective(&turn), 60, 1);  // launched late: known since 60
  ends.simulation.wait(0, 2, computed, nullptr, 0);
  ends.simulation.launch(0, 2, collective(&turn), 0, 2);
  ends.simulation.finish_device(0);
  EXPECT_EQ(ends.times[1], std::pair(Time{60}, Time{70}));
  // Its input was there at 7, before the collective ahead of it ended: its ranks left that
  // together.
  EXPECT_EQ(ends.times[2], std::pair(Time{70}, Time{80}));
}

TEST(Arrivals, AWayOverAnotherStreamCounts) {
  const int turn = 0;
  Ends ends;
  ends.simulation.launch(0, 2, collective(&turn), 0, 0);
  ends.simulation.launch(0, 1, task(30), 0, 1);
  const uint64_t computed = ends.simulation.record(0, 1, nullptr, 0);
  ends.simulation.wait(0, 2, computed, nullptr, 0);
  ends.simulation.launch(0, 2, collective(&turn), 0, 2);
  ends.simulation.finish_device(0);
  EXPECT_EQ(ends.times[2], std::pair(Time{30}, Time{140}));
}

TEST(Arrivals, AGroupMeetsWhereALargerOneDoes) {
  const int all = 0;
  const int pair = 0;
  const int others = 0;
  Ends ends;
  ends.simulation.place(0, &all, {0, 1, 2, 3});
  ends.simulation.place(0, &pair, {0, 1});
  ends.simulation.place(0, &others, {0, 2});
  ends.simulation.launch(0, 1, task(7), 0, 0);
  ends.simulation.launch(0, 1, collective(&pair), 0, 1);    // late by 100
  ends.simulation.launch(0, 1, collective(&others), 0, 2);  // likewise
  ends.simulation.launch(0, 1, collective(&all), 0, 3);     // all have met through these two
  ends.simulation.launch(0, 1, collective(&pair), 0, 4);
  ends.simulation.finish_device(0);
  EXPECT_EQ(ends.times[1].second, 117);
  EXPECT_EQ(ends.times[2].second, 227);
  EXPECT_EQ(ends.times[3].second, 237);
  EXPECT_EQ(ends.times[4].second, 247);
}

TEST(Arrivals, TwoGroupsThatMeetLeadToThoseOfBoth) {
  const int all = 0;
  const int row = 0;
  const int column = 0;
  Ends ends;
  // This rank is number 3 of two rows of four.
  ends.simulation.place(0, &row, {0, 1, 2, 3});
  ends.simulation.place(0, &column, {3, 7});
  ends.simulation.place(0, &all, {0, 1, 2, 3, 4, 5, 6, 7});
  for (uint32_t i = 0; i < 5; ++i) ends.simulation.launch(0, 1, task(10), 0, i);
  ends.simulation.launch(0, 1, collective(&row), 0, 5);
  for (uint32_t i = 6; i < 10; ++i) ends.simulation.launch(0, 1, task(10), 0, i);
  ends.simulation.launch(0, 1, collective(&column), 0, 10);
  ends.simulation.launch(0, 1, collective(&all), 0, 11);
  ends.simulation.launch(0, 1, collective(&row), 0, 12);
  ends.simulation.finish_device(0);
  EXPECT_EQ(ends.times[5].second, 50 + 223 + 10);
  EXPECT_EQ(ends.times[10].second, 283 + 40 + 300 + 10);
  EXPECT_EQ(ends.times[11].second, 633 + 200 + 10);  // rows stand apart since four tasks, not nine
  EXPECT_EQ(ends.times[12].second, 853);
}

TEST(Arrivals, GroupsThatDoNotReachAllLeaveTheOthersBehind) {
  const int all = 0;
  const int pair = 0;
  Ends ends;
  ends.simulation.place(0, &pair, {0, 1});
  ends.simulation.place(0, &all, {0, 1, 2, 3});
  ends.simulation.launch(0, 1, task(10), 0, 0);
  ends.simulation.launch(0, 1, collective(&pair), 0, 1);
  ends.simulation.launch(0, 1, collective(&all), 0, 2);
  ends.simulation.finish_device(0);
  EXPECT_EQ(ends.times[2].second, 120 + 100 + 10);
}

TEST(Arrivals, TheLastOfManyIsLater) {
  EXPECT_EQ(Arrivals::expected_maximum(1), 0);
  EXPECT_EQ(Arrivals::expected_maximum(2), 564'190);
  EXPECT_EQ(Arrivals::expected_maximum(12), (1'423'600 + 1'765'991) / 2);
  EXPECT_EQ(Arrivals::expected_maximum(5000), 3'248'240);
}

}  // namespace
}  // namespace vnpu::timing
