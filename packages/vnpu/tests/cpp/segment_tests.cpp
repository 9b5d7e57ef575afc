#include "collective/segment.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "device/failure.h"

namespace vnpu {
namespace {

constexpr uint32_t kRanks = 3;

std::string message_of(const Invitation& invitation, uint32_t ranks) {
  try {
    const Segment segment(invitation, ranks);
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "nothing was thrown";
}

TEST(Segment, PartsDoNotOverlap) {
  const Invitation invitation = Segment::create();
  const Segment segment(invitation, kRanks);
  struct Part {
    uintptr_t begin;
    size_t bytes;
  };
  std::vector<Part> parts;
  const auto add = [&](const void* begin, size_t bytes) {
    parts.push_back({reinterpret_cast<uintptr_t>(begin), bytes});
  };
  add(&segment.header(), sizeof(SegmentHeader));
  for (uint32_t from = 0; from < kRanks; ++from) {
    add(&segment.rank(from), sizeof(RankBlock));
    for (uint32_t n = 0; n < 2; ++n) {  // rounds and collectives alternate
      add(segment.slot(from, n), Segment::kSlot);
      add(segment.sizes(from, n), 2 * kRanks * sizeof(uint64_t));
    }
    for (uint32_t to = 0; to < kRanks; ++to) {
      add(&segment.mailbox(from, to), sizeof(Mailbox));
      for (uint32_t chunk = 0; chunk < Mailbox::kDepth; ++chunk) {
        add(segment.mailbox_chunk(from, to, chunk), Mailbox::kChunk);
      }
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t j = i + 1; j < parts.size(); ++j) {
      const Part& a = parts[i];
      const Part& b = parts[j];
      ASSERT_TRUE(a.begin + a.bytes <= b.begin || b.begin + b.bytes <= a.begin) << i << " " << j;
    }
  }
  EXPECT_EQ(segment.slot(1, 0), segment.slot(1, 2));
  EXPECT_EQ(segment.mailbox_chunk(0, 1, 1), segment.mailbox_chunk(0, 1, 1 + Mailbox::kDepth));
  Segment::close_invitation(invitation);
}

TEST(Segment, RanksMustAgreeOnTheirNumber) {
  const Invitation invitation = Segment::create();
  const Segment segment(invitation, kRanks);
  const std::string text = message_of(invitation, kRanks + 1);
  EXPECT_NE(text.find("has 4 ranks, another one 3"), std::string::npos) << text;
  EXPECT_NE(message_of(invitation, 0).find("1 to 128 ranks"), std::string::npos);
  EXPECT_NE(message_of(invitation, Segment::kMaxRanks + 1).find("1 to 128 ranks"),
            std::string::npos);
  Segment::close_invitation(invitation);
}

TEST(Segment, AnOldInvitationIsRefused) {
  const Invitation invitation = Segment::create();
  Segment::close_invitation(invitation);
  const std::string text = message_of(invitation, kRanks);
  EXPECT_NE(text.find("no longer offers the group"), std::string::npos) << text;
}

TEST(Segment, BytesThatAreNoInvitationAreRefused) {
  Invitation invitation = Segment::create();
  invitation.magic = 0;
  EXPECT_NE(message_of(invitation, kRanks).find("HcclGetRootInfo"), std::string::npos);
  Segment::close_invitation(invitation);
}

TEST(Segment, AnInvitationFromAnotherHostSaysWhatLetsThemMeet) {
  const Invitation own = Segment::create();
  Invitation invitation = own;
  std::strcpy(invitation.host, "elsewhere");
  EXPECT_NE(message_of(invitation, kRanks).find("rank 0 has not said where they can meet"),
            std::string::npos);
  Segment::close_invitation(own);
}

TEST(Segment, AnInvitationOfAProcessThatEndedIsRefused) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const Invitation invitation = Segment::create();
    const bool sent = ::write(ends[1], &invitation, sizeof(invitation)) == sizeof(invitation);
    ::_exit(sent ? 0 : 1);
  }
  Invitation invitation{};
  ASSERT_EQ(::read(ends[0], &invitation, sizeof(invitation)),
            static_cast<ssize_t>(sizeof(invitation)));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ::close(ends[0]);
  ::close(ends[1]);
  EXPECT_NE(message_of(invitation, kRanks).find("ended before all ranks had joined"),
            std::string::npos);
}

TEST(Bell, WakesWhoSleepsAndLetsNobodySleepAfterARing) {
  Bell bell{};
  const auto begin = std::chrono::steady_clock::now();
  std::thread ringer([&] { bell.ring(); });
  while (bell.rings == 0) bell.wait(0, std::chrono::seconds(20));
  ringer.join();
  bell.wait(0, std::chrono::seconds(20));  // it has rung since: returns at once
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  bell.wait(bell.rings, std::chrono::milliseconds(1));  // nobody rings: the limit ends it
}

}  // namespace
}  // namespace vnpu
