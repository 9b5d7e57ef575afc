#include "timing/cache.h"

#include <gtest/gtest.h>

#include <vector>

namespace vnpu::timing {
namespace {

TEST(TheCache, HasWhatWasUsedLast) {
  Cache cache(100);
  EXPECT_EQ(cache.use(0, 60).bytes, 0);
  EXPECT_EQ(cache.use(20, 40).bytes, 20);   // the middle is the newest
  EXPECT_EQ(cache.use(200, 250).bytes, 0);  // [0, 10) leaves, as the oldest
  EXPECT_EQ(cache.use(40, 60).bytes, 20);
  EXPECT_EQ(cache.use(10, 20).bytes, 10);
  EXPECT_EQ(cache.use(300, 320).bytes, 0);  // [20, 40) leaves
  EXPECT_EQ(cache.use(20, 40).bytes, 0);
}

TEST(TheCache, KeepsTheEndOfWhatIsLarger) {
  Cache cache(100);
  cache.use(0, 50);
  EXPECT_EQ(cache.use(1000, 1150).bytes, 0);
  EXPECT_EQ(cache.use(0, 50).bytes, 0);
  cache.use(1000, 1150);
  EXPECT_EQ(cache.use(1050, 1150).bytes, 100);
  // From the begin, each loaded byte evicts one that is used later.
  EXPECT_EQ(cache.use(1000, 1150).bytes, 0);
}

TEST(TheCache, HasThePartOfALargerRangeThatIsUsedFirst) {
  Cache cache(100);
  cache.use(1000, 1040);
  EXPECT_EQ(cache.use(1000, 1500).bytes, 40);
  cache.use(1460, 1500);
  EXPECT_EQ(cache.use(1000, 1500).bytes, 0);  // its end has left when its turn comes
}

TEST(TheCache, KnowsWhatWasTouchedAsPartOfMore) {
  Cache cache(100);
  cache.use(0, 30);
  cache.touch(1000, 20);
  EXPECT_EQ(cache.find(0, 9000).bytes, 50);
  EXPECT_EQ(cache.find(0, 9000).touched, 20);
  EXPECT_EQ(cache.use(1000, 1030).bytes, 20);
  EXPECT_EQ(cache.find(1000, 9000).touched, 0);
}

TEST(TheCache, IsLookedIntoWithoutUse) {
  Cache cache(100);
  cache.use(0, 80);
  cache.bring(5000, 5010, 3);
  EXPECT_EQ(cache.find(20, 9000).bytes, 70);
  EXPECT_EQ(cache.find(5005, 9000).arrivals, std::vector<uint64_t>{3});
  cache.use(200, 220);  // [0, 10) is the oldest still
  EXPECT_EQ(cache.find(0, 80).bytes, 70);
}

TEST(TheCache, ForgetsWhatOthersWrote) {
  Cache cache(100);
  cache.use(0, 50);
  cache.forget(10, 20);
  EXPECT_EQ(cache.use(0, 50).bytes, 40);
}

TEST(TheCache, TellsOnceWhatHasYetToArrive) {
  Cache cache(100);
  cache.use(0, 10);
  EXPECT_EQ(cache.bring(0, 30, 7), 10);
  EXPECT_EQ(cache.bring(30, 50, 8), 0);
  EXPECT_TRUE(cache.use(0, 10).arrivals.empty());
  EXPECT_EQ(cache.use(0, 50).arrivals, (std::vector<uint64_t>{7, 8}));
  EXPECT_TRUE(cache.use(0, 50).arrivals.empty());
}

}  // namespace
}  // namespace vnpu::timing
