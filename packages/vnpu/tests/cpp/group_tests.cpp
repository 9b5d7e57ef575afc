#include "collective/group.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "collective/collective.h"
#include "failures.h"

namespace vnpu {
namespace {

constexpr TimeLimits kLimits{std::chrono::seconds(20), std::chrono::seconds(20)};

// Two ranks in one process, which is all that a group needs.
struct Pair {
  Invitation invitation = Segment::create();
  GroupPtr first = std::make_shared<Group>(invitation, 2, 0, 0, "pair", kLimits);
  GroupPtr second = std::make_shared<Group>(invitation, 2, 1, 1, "pair", kLimits);
  Pair() {
    second->await_all();
    first->await_all();  // rank 0 closes the invitation
  }
};

using tests::message_of;

// Checks the other rank as a waiting task does, until the check throws or `limit` is up.
std::string wait_for_other(Group& group, std::chrono::milliseconds limit) {
  Group::Wait wait{};
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    const std::string text = message_of([&] {
      group.throw_if_failed();
      group.check(
          wait, [](uint32_t rank) { return rank == 1; }, [] { return std::string("a test"); }, "");
    });
    if (text != "nothing was thrown") return text;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return "nothing was thrown";
}

TEST(Group, AForkedChildThatDropsItsCopyLeavesTheRankInTheGroup) {
  Pair pair;
  const pid_t child = ::fork();
  if (child == 0) {
    pair.second.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(wait_for_other(*pair.first, std::chrono::milliseconds(200)), "nothing was thrown");
  pair.second.reset();  // the rank itself
  EXPECT_NE(wait_for_other(*pair.first, std::chrono::seconds(10)).find("has left the group"),
            std::string::npos);
}

// While it lives, this process can open no file.
class NoDescriptors {
 public:
  NoDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(Group, ARankWithoutAFreeDescriptorTakesNobodyForDead) {
  Pair pair;
  const NoDescriptors none;
  ASSERT_EQ(::open("/proc/self/stat", O_RDONLY), -1);
  EXPECT_EQ(wait_for_other(*pair.first, std::chrono::milliseconds(200)), "nothing was thrown");
}

TEST(ProcessIdentity, WithoutAFreeDescriptorAProcessThatHasEndedIsStillDead) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const ProcessIdentity own = ProcessIdentity::self();
  const NoDescriptors none;
  EXPECT_TRUE(own.alive());
  EXPECT_FALSE((ProcessIdentity{child, own.start_time}.alive()));
  EXPECT_NE(message_of([] { ProcessIdentity::self(); }).find("ulimit -n"), std::string::npos);
}

class LacksMemory final : public Collective {
 public:
  LacksMemory(GroupPtr group, bool lacks)
      : Collective(std::move(group), {0, static_cast<uint32_t>(Operation::kBarrier), 0,
                                      Announcement::kNone, Announcement::kNone, 0, 0, 0}),
        lacks_(lacks) {}

 private:
  uint32_t rounds() const override { return 1; }
  SlotUse put(uint32_t, std::byte*) override {
    if (lacks_) throw std::bad_alloc();
    return {};
  }
  void get(uint32_t, std::span<const std::byte* const>) override {}
  const bool lacks_;
};

TEST(Group, ARankThatLacksMemoryInACollectiveTellsTheOthers) {
  Pair pair;
  LacksMemory waits(pair.first, false);
  LacksMemory fails(pair.second, true);
  EXPECT_EQ(waits.step(), Progress::kBlocked);
  EXPECT_THROW(fails.step(), std::bad_alloc);
  const std::string text = message_of([&] { waits.step(); });
  EXPECT_NE(text.find("rank 1 (pid"), std::string::npos) << text;
  EXPECT_NE(text.find("failed in barrier #1 of group pair"), std::string::npos) << text;
  EXPECT_NE(text.find("its host is out of memory"), std::string::npos) << text;
}

}  // namespace
}  // namespace vnpu
