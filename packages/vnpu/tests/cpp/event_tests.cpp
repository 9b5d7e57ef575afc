#include "device/event.h"

#include <gtest/gtest.h>

namespace vnpu {
namespace {

TEST(Event, IsCompleteBeforeItIsRecorded) {
  const Event event(0);
  EXPECT_TRUE(event.complete());
  EXPECT_TRUE(event.reached(0));
}

TEST(Event, IsCompleteWhenItsNewestRecordIsReached) {
  Event event(0);
  event.recorded = 2;
  EXPECT_FALSE(event.complete());
  event.complete(1, std::nullopt);
  EXPECT_TRUE(event.reached(1));
  EXPECT_FALSE(event.complete());
  event.complete(2, std::nullopt);
  EXPECT_TRUE(event.complete());
}

TEST(Event, ALaterRecordSaysNothingOfAnEarlierOne) {
  Event event(0);
  event.recorded = 3;
  event.complete(3, std::nullopt);
  EXPECT_TRUE(event.reached(3));
  EXPECT_FALSE(event.reached(1));
  EXPECT_FALSE(event.reached(2));
  event.complete(2, std::nullopt);
  EXPECT_FALSE(event.reached(1));
  event.complete(1, std::nullopt);
  EXPECT_TRUE(event.reached(1));
}

TEST(Event, ItsTimeIsThatOfTheNewestReachedRecord) {
  Event event(0);
  event.complete(2, std::nullopt);
  const int64_t time = event.time_ns;
  EXPECT_GT(time, 0);
  event.complete(1, std::nullopt);
  EXPECT_EQ(event.time_ns, time);
}

TEST(Event, AFailureIsOfItsRecordOnly) {
  Event event(0);
  event.complete(1, Failure(FailureKind::kOperatorFailed, "went wrong"));
  event.complete(2, std::nullopt);
  EXPECT_THROW(event.throw_if_failed(1), Failure);
  EXPECT_NO_THROW(event.throw_if_failed(2));
}

TEST(EventWait, BlocksUntilItsRecordAndFailsWithIt) {
  const auto event = std::make_shared<Event>(0);
  event->recorded = 2;
  EventWait first(event, 1);
  EventWait second(event, 2);
  EventRecord record(event, 1);
  EXPECT_EQ(first.step(), Progress::kBlocked);
  EXPECT_NE(first.waiting_for().find("record 1 of event"), std::string::npos);
  record.fail(Failure(FailureKind::kOperatorFailed, "went wrong"));
  EXPECT_EQ(record.step(), Progress::kDone);
  EXPECT_THROW(first.step(), Failure);
  EXPECT_EQ(second.step(), Progress::kBlocked);
  EXPECT_EQ(EventRecord(event, 2).step(), Progress::kDone);
  EXPECT_EQ(second.step(), Progress::kDone);
}

}  // namespace
}  // namespace vnpu
