#include "device/observer.h"

#include <gtest/gtest.h>

#include "tasks.h"

namespace vnpu {
namespace {

using tests::call;
using tests::failing;
using tests::make_executor;

// Writes down what it is told.
class Witness final : public Observer {
 public:
  Needs needs() const override { return {}; }
  void on_launch(const Stream& stream, const Task& task, const std::string& site) override {
    EXPECT_EQ(site, "");  // nobody needs it
    say(stream.capture == nullptr ? "launch" : "captured launch", stream, task.name);
  }
  void on_record(const Stream& stream, const Event&) override { say("record", stream); }
  void on_wait(const Stream& stream, const Event&, const std::string&) override {
    say("wait", stream);
  }
  void on_capture_begin(const Graph&) override { seen += "capture begin; "; }
  void on_capture_end(const Graph&) override { seen += "capture end; "; }
  void on_stream_synchronized(const Stream& stream, const std::string&) override {
    say("synchronized", stream);
  }
  void on_event_synchronized(const Event&, const std::string&) override {
    seen += "event synchronized; ";
  }
  void on_advance(const Stream& stream, const Task& task) override {
    say("advance", stream, task.name);
  }
  void on_blocked(const Stream& stream, const Task& task) override {
    say("blocked", stream, task.name);
  }
  void on_end(const Stream& stream, const Task& task, bool failed) override {
    say(failed ? "failed" : "end", stream, task.name);
  }

  std::string take() { return std::exchange(seen, ""); }

 private:
  void say(const char* what, const Stream& stream, const char* task = "") {
    seen += std::string(what) + " " + std::to_string(stream.id) + (*task == '\0' ? "" : " ") +
            task + "; ";
  }
  std::string seen;
};

class Witnessed : public ::testing::Test {
 protected:
  Witnessed() { observers.add(witness); }

  Witness& witness = *new Witness();
  Observers& observers = *new Observers();
  Executor& executor = make_executor(SchedulePolicy::kEager, 0, observers);
  StreamPtr a = executor.create_stream(0, 0);
  StreamPtr b = executor.create_stream(0, 0);
};

TEST_F(Witnessed, ATaskIsLaunchedAdvancedAndEnded) {
  executor.submit(a, call([] {}));
  EXPECT_EQ(witness.take(), "launch 0 call; advance 0 call; end 0 call; ");
  EXPECT_THROW(executor.submit(a, failing("went wrong")), Failure);
  EXPECT_EQ(witness.take(), "launch 0 call; advance 0 call; failed 0 call; ");
}

TEST_F(Witnessed, ARecordIsSeenBeforeItsTask) {
  const auto event = std::make_shared<Event>(0);
  executor.record(a, event);
  EXPECT_EQ(witness.take(),
            "record 0; launch 0 event record; advance 0 event record; end 0 event record; ");
  executor.wait(b, event);  // reached already: no task
  EXPECT_EQ(witness.take(), "wait 1; ");
  executor.synchronize(event, std::nullopt);
  EXPECT_TRUE(executor.query(event));
  EXPECT_EQ(witness.take(), "event synchronized; event synchronized; ");
}

TEST_F(Witnessed, ABlockedTaskAdvancesAgain) {
  const auto gate = std::make_shared<tests::Gate>();
  gate->open = false;
  executor.submit(a, gate);
  EXPECT_EQ(witness.take().rfind("launch 0 gate; advance 0 gate; blocked 0 gate; ", 0), 0u);
  gate->open = true;
  executor.synchronize(a, std::nullopt);
  const std::string seen = witness.take();
  EXPECT_NE(seen.find("advance 0 gate; end 0 gate; synchronized 0; "), std::string::npos) << seen;
}

TEST_F(Witnessed, ACapturedLaunchHasNoCourse) {
  executor.begin_capture(a);
  executor.submit(a, call([] {}));
  executor.end_capture(a);
  EXPECT_EQ(witness.take(), "capture begin; captured launch 0 call; capture end; ");
}

TEST_F(Witnessed, TheHostHasSeenAllStreamsOfItsDevice) {
  const StreamPtr other = executor.create_stream(1, 0);
  executor.synchronize_device(0, std::nullopt);
  EXPECT_EQ(witness.take(), "synchronized 0; synchronized 1; ");
}

TEST(Observers, NeedsAreThoseOfAllTogether) {
  class Needy final : public Observer {
   public:
    explicit Needy(Needs needs) : needs_(needs) {}
    Needs needs() const override { return needs_; }

   private:
    const Needs needs_;
  };
  Needy first({.call_sites = true});
  Needy second({.deadlocks = true});
  Observers observers;
  EXPECT_FALSE(observers.any());
  observers.add(first);
  observers.add(second);
  EXPECT_TRUE(observers.any());
  EXPECT_TRUE(observers.needs().call_sites);
  EXPECT_TRUE(observers.needs().deadlocks);
  EXPECT_FALSE(observers.needs().accesses);
}

TEST(Observers, ThisProcessHasNone) { EXPECT_FALSE(Observers::instance().any()); }

}  // namespace
}  // namespace vnpu
