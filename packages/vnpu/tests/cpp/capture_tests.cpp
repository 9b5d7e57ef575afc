// What holds of captures and graphs under every schedule.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "device/executor.h"
#include "schedules.h"
#include "tasks.h"

namespace vnpu {
namespace {

using tests::call;

class Captures : public tests::Schedules {};

INSTANTIATE_TEST_SUITE_P(All, Captures, ::testing::ValuesIn(tests::kPolicies),
                         tests::name_of_policy);

TEST_P(Captures, ACaptureKeepsWorkOfAllStreamsThatJoinItAndReplaysIt) {
  std::vector<int> ran;
  const auto event = std::make_shared<Event>(0);
  const GraphPtr graph = executor.begin_capture(a);
  executor.submit(a, call([&] { ran.push_back(1); }));
  executor.record(a, event);
  executor.wait(b, event);
  executor.submit(b, call([&] { ran.push_back(2); }));
  const auto joined = std::make_shared<Event>(0);
  executor.record(b, joined);
  executor.wait(a, joined);
  executor.submit(a, call([&] { ran.push_back(3); }));
  EXPECT_THROW(executor.synchronize(a, std::nullopt), Failure);
  EXPECT_THROW(executor.end_capture(b), Failure);
  EXPECT_EQ(executor.end_capture(a), graph);
  EXPECT_TRUE(ran.empty());
  EXPECT_EQ(executor.capture_of(b), nullptr);
  for (int i = 0; i < 2; ++i) executor.submit(a, std::make_shared<GraphReplay>(graph));
  executor.synchronize(a, std::nullopt);
  EXPECT_EQ(ran, (std::vector<int>{1, 2, 3, 1, 2, 3}));
}

TEST_P(Captures, ATaskGroupOfAGraphCanBeReplaced) {
  std::string ran;
  const GraphPtr graph = executor.begin_capture(a);
  executor.submit(a, call([&] { ran += 'a'; }));
  executor.begin_group(a);
  executor.submit(a, call([&] { ran += 'b'; }));
  const auto group = executor.end_group(a);
  executor.submit(a, call([&] { ran += 'c'; }));
  executor.end_capture(a);
  executor.begin_update(b, group);
  executor.submit(b, call([&] { ran += 'B'; }));
  EXPECT_THROW(executor.submit(b, call([] {})), Failure);  // the group holds one task
  executor.end_update(b);
  const auto updated = std::make_shared<Event>(0);
  executor.record(b, updated);
  executor.wait(a, updated);
  executor.submit(a, std::make_shared<GraphReplay>(graph));
  executor.synchronize(a, std::nullopt);
  EXPECT_EQ(ran, "aBc");
}

TEST_P(Captures, AStreamThatDoesNotComeBackIsNamedWhenItsCaptureEnds) {
  const auto event = std::make_shared<Event>(0);
  executor.begin_capture(a);
  executor.record(a, event);
  executor.wait(b, event);
  executor.submit(b, call([] {}));
  try {
    executor.end_capture(a);
    FAIL() << "the capture ended";
  } catch (const CaptureFailure& failure) {
    EXPECT_EQ(failure.rule, CaptureRule::kUnjoined);
  }
  EXPECT_EQ(executor.capture_of(b), nullptr);  // and the streams are free again
}

TEST_P(Captures, ASynchronousCallIsRefusedWhileACaptureMindsIt) {
  executor.begin_capture(a, CaptureMode::kGlobal);
  EXPECT_THROW(executor.check_synchronous(CaptureMode::kGlobal, "a copy"), CaptureFailure);
  EXPECT_NO_THROW(executor.check_synchronous(CaptureMode::kRelaxed, "a copy"));
  executor.end_capture(a);
  executor.begin_capture(a, CaptureMode::kRelaxed);
  EXPECT_NO_THROW(executor.check_synchronous(CaptureMode::kGlobal, "a copy"));
  executor.end_capture(a);
  EXPECT_NO_THROW(executor.check_synchronous(CaptureMode::kGlobal, "a copy"));
}

TEST_P(Captures, TaskGroupsOfOneCaptureDoNotOverlap) {
  const auto event = std::make_shared<Event>(0);
  executor.begin_capture(a);
  executor.record(a, event);
  executor.wait(b, event);
  executor.begin_group(a);
  EXPECT_THROW(executor.begin_group(b), CaptureFailure);
  EXPECT_THROW(executor.submit(b, call([] {})), CaptureFailure);
  EXPECT_THROW(executor.end_group(b), CaptureFailure);
  executor.end_group(a);
  executor.end_capture(a);
}

}  // namespace
}  // namespace vnpu
