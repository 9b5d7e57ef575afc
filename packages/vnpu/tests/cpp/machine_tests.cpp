#include "timing/machine.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "device/failure.h"
#include "machine_figures.h"
#include "timing/fluid.h"
#include "timing/resources.h"
#include "timing/work.h"

namespace vnpu::timing {
namespace {

using tests::Changes;
using tests::figures;

constexpr size_t kCube = index_of(Resource::kCube);
constexpr size_t kHbm = index_of(Resource::kHbm);

TEST(MachineFigures, AreRefusedByNameWhereTheyDoNotFit) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      const Machine machine(text);
    } catch (const Failure& failure) {
      return failure.what();
    }
    return "";
  };
  EXPECT_EQ(message(figures()), "");
  EXPECT_NE(message(figures({{"hbm_bandwidth", ""}})).find("lacks the figure hbm_bandwidth"),
            std::string::npos);
  EXPECT_NE(message(figures({{"hbm_bandwidth", "0"}})).find("0 for hbm_bandwidth"),
            std::string::npos);
  EXPECT_NE(message(figures({{"hbm_bandwidth", "1.5"}})).find("no integer"), std::string::npos);
  EXPECT_NE(message(figures({{"new_figure", "1"}})).find("unknown figure: new_figure"),
            std::string::npos);
  EXPECT_NE(message(figures({{"tier0_ranks", ""}})).find("no tier of links"), std::string::npos);
}

TEST(MachineWork, AnOperatorTakesTheTimeOfWhatItUsesLongest) {
  const Machine machine(figures({{"matmul_static", "7"}}));
  Work work{.kind = Work::Class::kMatmul, .products = {}};
  work.products.push_back({.m = 32, .n = 32, .k = 32});
  work.read_bytes = 50;
  const Phase phase = machine.phases_of(work).at(0);
  EXPECT_EQ(phase.busy[kCube], 2 * 32 * 32 * 32);
  EXPECT_EQ(phase.busy[kHbm], 50);
  EXPECT_EQ(phase.alone(), 7 + 2 * 32 * 32 * 32);
}

TEST(MachineWork, TheLastWaveOfTilesKeepsAllCores) {
  const Machine machine(figures());
  Work work{.kind = Work::Class::kMatmul, .products = {}};
  work.products.push_back({.m = 128 * 25, .n = 256, .k = 16});  // 25 tiles for 24 cores
  const Time one = int64_t{2} * 128 * 256 * 16;
  EXPECT_EQ(machine.phases_of(work).at(0).busy[kCube], 48 * one);
}

TEST(MachineWork, OnSomeOfTheCoresItTakesWhatThoseNeed) {
  const Machine machine(figures({{"l2_bandwidth", "4000000000000"}}));
  Work sum{
      .kind = Work::Class::kVector, .products = {}, .vector_operations = 60, .read_bytes = 400};
  const Phase all = machine.phases_of(sum).at(0);
  EXPECT_EQ(all.least, 0);
  EXPECT_EQ(all.work(), 400);
  const Phase few = machine.phases_of(sum, 0, Cores{.cube = 24, .vector = 6}).at(0);
  EXPECT_EQ(few.busy, all.busy);
  EXPECT_EQ(few.work(), 800);  // 100 at L2, through an eighth of the cores
  EXPECT_EQ(shares_of(few)[kHbm], kWhole / 2);
  EXPECT_EQ(machine.phases_of(sum, 0, Cores{.cube = 1, .vector = 48}).at(0).work(), 400);

  Work product{.kind = Work::Class::kMatmul, .products = {}};
  product.products.push_back({.m = 128 * 25, .n = 256, .k = 16});  // 25 tiles
  const Time one = int64_t{2} * 128 * 256 * 16;
  const Phase on_six = machine.phases_of(product, 0, Cores{.cube = 6, .vector = 48}).at(0);
  EXPECT_EQ(on_six.busy[kCube], 30 * one);  // five waves
  EXPECT_EQ(on_six.work(), 4 * 30 * one);
  // With vector work it is launched on cube cores with two vector cores each.
  product.vector_operations = 1;
  EXPECT_EQ(machine.phases_of(product, 0, Cores{.cube = 24, .vector = 12}).at(0).work(),
            4 * 30 * one);
}

TEST(MachineCollectives, AnAllReduceIsAReduceScatterAndAnAllGatherOfEveryTier) {
  const Changes two_tiers = {{"tier1_ranks", "2"},
                             {"tier1_bandwidth", "500000000000"},
                             {"tier1_share", "500000"},
                             {"tier1_all_to_all_share", "500000"},
                             {"tier1_latency", "3"}};
  const Machine machine(figures(two_tiers));
  const std::vector<Phase> phases = machine.phases_of(Collective{Exchange::kAllReduce, 1600, 16});
  ASSERT_EQ(phases.size(), 4U);
  EXPECT_EQ(phases[0].busy[index_of(Resource::kLinks0)], 1400);
  EXPECT_EQ(phases[1].fixed, 3);
  EXPECT_EQ(phases[1].busy[index_of(Resource::kLinks1)], 400);  // 100 bytes at a quarter
  EXPECT_EQ(phases[2].busy, [&] {
    Busy busy = phases[1].busy;
    busy[kHbm] = 400;
    return busy;
  }());
  EXPECT_EQ(phases[3].busy[index_of(Resource::kLinks0)], 1400);
  EXPECT_THROW(machine.phases_of(Collective{Exchange::kAllReduce, 16, 17}), Failure);
}

TEST(MachineCollectives, AGroupOfDistantRanksCrossesTiers) {
  const Machine machine(figures({{"tier1_ranks", "2"},
                                 {"tier1_bandwidth", "1000000000000"},
                                 {"tier1_share", "1000000"},
                                 {"tier1_all_to_all_share", "250000"},
                                 {"tier1_latency", "0"}}));
  // Ranks 0 and 8: one in each unit of 8.
  const std::vector<Phase> phases =
      machine.phases_of(Collective{Exchange::kAllGather, 100, 2, /*stride=*/8});
  ASSERT_EQ(phases.size(), 1U);
  EXPECT_EQ(phases[0].busy[index_of(Resource::kLinks0)], 0);
  EXPECT_EQ(phases[0].busy[index_of(Resource::kLinks1)], 50);
  // All-to-alls may reach less.
  const std::vector<Phase> slow =
      machine.phases_of(Collective{Exchange::kAllToAll, 100, 2, /*stride=*/8});
  EXPECT_EQ(slow.at(0).busy[index_of(Resource::kLinks1)], 4 * 50);
  // Ranks 0, 4, 8 and 12: two in each.
  const std::vector<Phase> four =
      machine.phases_of(Collective{Exchange::kAllGather, 100, 4, /*stride=*/4});
  ASSERT_EQ(four.size(), 2U);
  EXPECT_EQ(four[1].busy[index_of(Resource::kLinks0)], 50);
}

TEST(MachineCollectives, StepsBetweenUnitsGrowWithTheLogarithmOfTheirNumber) {
  const Machine machine(figures({{"tier0_latency", "5"},
                                 {"tier1_ranks", "12"},
                                 {"tier1_bandwidth", "1000000000000"},
                                 {"tier1_share", "1000000"},
                                 {"tier1_all_to_all_share", "1000000"},
                                 {"tier1_latency", "7"}}));
  const auto fixed = [&](Exchange exchange, int64_t ranks, int64_t stride) {
    Time sum = 0;
    for (const Phase& phase : machine.phases_of(Collective{exchange, 960, ranks, stride})) {
      sum += phase.fixed;
    }
    return sum;
  };
  EXPECT_EQ(fixed(Exchange::kAllReduce, 8, 1), 2 * 5);  // a mesh: one step each way
  EXPECT_EQ(fixed(Exchange::kAllGather, 8, 8), 3 * 7);
  EXPECT_EQ(fixed(Exchange::kReduceScatter, 12, 8), 4 * 7);
  EXPECT_EQ(fixed(Exchange::kBarrier, 96, 1), 5 + 4 * 7);
  EXPECT_EQ(fixed(Exchange::kAllToAll, 96, 1), 7);  // straight to everyone
}

TEST(MachineWork, ReadsAgainWhatDoesNotStayInL2) {
  const Machine machine(figures({{"l2_bytes", "4096"}}));
  Work work{.kind = Work::Class::kMatmul, .products = {}};
  work.products.push_back({.m = 64, .n = 64, .k = 32});  // both operands: 4096 bytes, two panels
  work.read_bytes = 8192;
  EXPECT_EQ(machine.phases_of(work).at(0).busy[kHbm], 8192 + 4096);
  EXPECT_EQ(machine.phases_of(work, 8192).at(0).busy[kHbm], 4096);
}

}  // namespace
}  // namespace vnpu::timing
