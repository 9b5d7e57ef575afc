// Properties of captures and graphs under every schedule.

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
