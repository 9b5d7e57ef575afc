#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "device/event.h"
#include "device/failure.h"
#include "tasks.h"
#include "timing/cache.h"
#include "timing/machine.h"
#include "timing/model.h"
#include "timing/simulation.h"
#include "timing/work.h"

namespace vnpu::timing {
namespace {

using tests::make_executor;

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

using Changes = std::map<std::string, std::string>;

// A chip whose figures are round: 1 operation per ps, 1 byte per ps, no fixed times.
std::string figures(const Changes& changes = {}) {
  Changes values;
  for (const std::string& name : Machine::figure_names()) {
    const bool is_time = name.ends_with("_static") || name.ends_with("_jitter") ||
                         name.starts_with("event_") || name == "graph_node" ||
                         name == "queue_change" || name.starts_with("host_");
    values[name] = is_time                    ? "0"
                   : name.ends_with("_share") ? "1000000"
                   : name == "cube_cores"     ? "24"
                   : name == "vector_cores"   ? "48"
                   : name == "queue_depth"    ? "1000"
                                              : "1000000000000";
  }
  values["tier0_ranks"] = "8";
  values["tier0_bandwidth"] = "1000000000000";
  values["tier0_share"] = "1000000";
  values["tier0_all_to_all_share"] = "1000000";
  values["tier0_latency"] = "0";
  for (const auto& [name, value] : changes) values[name] = value;
  std::string text;
  for (const auto& [name, value] : values) {
    if (!value.empty()) text += (text.empty() ? "" : ";") + name + "=" + value;
  }
  return text;
}

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
  // From its begin, each byte drives out one that is used later.
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

TEST(Simulation, TasksOfAStreamFollowEachOther) {
  std::vector<Span> spans;
  Simulation simulation([&](const Span& span) { spans.push_back(span); });
  simulation.launch(0, 1, plan({work(5, {{Resource::kCube, 100}})}), 10);
  simulation.launch(0, 1, plan({work(0, {{Resource::kHbm, 50}})}), 20);
  EXPECT_EQ(simulation.finish_stream(1), 10 + 105 + 50);
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].begin, 10);
  EXPECT_EQ(spans[0].end, 115);
  EXPECT_EQ(spans[1].begin, 115);
}

TEST(Simulation, TasksThatRunTogetherShareWhatBothUse) {
  Simulation simulation;
  simulation.launch(0, 1, plan({work(0, {{Resource::kHbm, 100}})}), 0);
  simulation.launch(0, 2, plan({work(0, {{Resource::kHbm, 200}})}), 0);
  simulation.launch(0, 3, plan({work(0, {{Resource::kCube, 100}})}), 0);
  EXPECT_EQ(simulation.finish_stream(3), 100);
  EXPECT_EQ(simulation.finish_stream(1), 200);
  EXPECT_EQ(simulation.finish_stream(2), 300);
  EXPECT_EQ(simulation.usage(0).busy[kHbm], 300);
  EXPECT_EQ(simulation.usage(0).any, 300);
}

TEST(Simulation, FixedTimesAreNotShared) {
  Simulation simulation;
  for (int stream = 1; stream < 5; ++stream) simulation.launch(0, stream, plan({work(70, {})}), 0);
  EXPECT_EQ(simulation.finish_device(0), 70);
}

TEST(Simulation, AWaitLastsUntilItsRecordIsReached) {
  Simulation simulation;
  simulation.launch(0, 1, plan({work(0, {{Resource::kCube, 100}})}), 0);
  const uint64_t record = simulation.record(0, 1, nullptr, 0);
  simulation.wait(0, 2, record, nullptr, 0);
  simulation.launch(0, 2, plan({work(0, {{Resource::kHbm, 10}})}), 0);
  EXPECT_EQ(simulation.finish_stream(2), 110);
  EXPECT_EQ(simulation.time_of(record), 100);
}

TEST(Simulation, TasksOfOneTurnRunInTheOrderOfLaunch) {
  const int turn = 0;
  Simulation simulation;
  simulation.launch(0, 1, plan({work(0, {{Resource::kCube, 40}})}), 0);
  simulation.launch(0, 1, plan({work(10, {})}, &turn), 0);
  simulation.launch(0, 2, plan({work(10, {})}, &turn), 0);
  EXPECT_EQ(simulation.finish_stream(2), 60);
}

TEST(Simulation, DevicesShareNothing) {
  Simulation simulation;
  simulation.launch(0, 1, plan({work(0, {{Resource::kHbm, 100}})}), 0);
  simulation.launch(1, 2, plan({work(0, {{Resource::kHbm, 100}})}), 0);
  EXPECT_EQ(simulation.finish_stream(1), 100);
  EXPECT_EQ(simulation.finish_stream(2), 100);
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

// An operator of the program's, as libopapi makes them.
TaskPtr operation(int64_t bytes) {
  auto task = std::make_shared<tests::Call>([] {}, "aclnnTest");
  task->work = std::make_shared<Work>(Work{.products = {}, .read_bytes = bytes});
  return task;
}

// A model of its own, which sees what the executor is asked for. Both live as the process does.
struct Program {
  explicit Program(const Changes& changes = {})
      : model(*new Model(Machine(figures(changes)), nullptr)),
        executor(make_executor(SchedulePolicy::kEager, 0, observed_by(model))) {}
  static const Observers& observed_by(Model& model) {
    auto* observers = new Observers();
    observers->add(model);
    return *observers;
  }
  Model& model;
  Executor& executor;
};

TEST(TheModel, JoinsTheHostsClockAtSynchronisations) {
  const Program program(Changes{{"host_operator_launch", "10"}, {"host_synchronize", "1"}});
  Model& model = program.model;
  Executor& executor = program.executor;
  const StreamPtr stream = executor.create_stream(0, 0);
  executor.submit(stream, operation(100));
  executor.submit(stream, operation(5));
  executor.synchronize(stream, std::nullopt);
  // Launched at 10 and 20; done at 110 and 115; then the call returns.
  const Model::Report report = model.report(0);
  EXPECT_EQ(report.host, 116);
  EXPECT_EQ(report.usage.compute, 105);
}

TEST(TheModel, GivesEventsTheirModelledTime) {
  const Program program;
  Model& model = program.model;
  Executor& executor = program.executor;
  const StreamPtr first = executor.create_stream(0, 0);
  const StreamPtr second = executor.create_stream(0, 0);
  const auto begin = std::make_shared<Event>(0);
  const auto end = std::make_shared<Event>(0);
  executor.record(first, begin);
  executor.submit(first, operation(100));
  executor.record(first, end);
  executor.wait(second, end);
  executor.submit(second, operation(11));
  executor.synchronize(end, std::nullopt);
  EXPECT_EQ(model.time_of(*begin), 0);
  EXPECT_EQ(model.time_of(*end), 100);
  executor.synchronize(second, std::nullopt);
  EXPECT_EQ(model.report(0).host, 111);
}

TEST(TheModel, TakesAReplayAsOneLaunchOfItsNodes) {
  const Program program(
      Changes{{"host_operator_launch", "1000"}, {"host_graph_launch", "7"}, {"graph_node", "2"}});
  Model& model = program.model;
  Executor& executor = program.executor;
  const StreamPtr main = executor.create_stream(0, 0);
  const StreamPtr side = executor.create_stream(0, 0);
  const auto fork = std::make_shared<Event>(0);
  const auto join = std::make_shared<Event>(0);
  executor.begin_capture(main);
  executor.submit(main, operation(100));
  executor.record(main, fork);
  executor.wait(side, fork);
  executor.submit(side, operation(50));
  executor.record(side, join);
  executor.submit(main, operation(50));
  executor.wait(main, join);
  const GraphPtr graph = executor.end_capture(main);
  for (int i = 0; i < 2; ++i) {
    executor.submit(main, std::make_shared<GraphReplay>(graph));
    executor.synchronize(main, std::nullopt);
    // 102, then both of 52 share memory: 102 + 2 + 100.
    EXPECT_EQ(model.report(0).host, (i + 1) * (7 + 102 + 2 + 100));
  }
}

TEST(TheModel, RefusesAnOperatorWithoutACost) {
  const Program program;
  Executor& executor = program.executor;
  const StreamPtr stream = executor.create_stream(0, 0);
  try {
    executor.submit(stream, std::make_shared<tests::Call>([] {}, "aclnnUnknown"));
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_NE(std::string(failure.what()).find("aclnnUnknown has no cost"), std::string::npos);
  }
}

TEST(TheModel, MakesTheHostWaitForRoomInAStreamsQueue) {
  const Program program(Changes{{"queue_depth", "2"}});
  Model& model = program.model;
  Executor& executor = program.executor;
  const StreamPtr stream = executor.create_stream(0, 0);
  for (int i = 0; i < 3; ++i) executor.submit(stream, operation(100));
  const auto event = std::make_shared<Event>(0);
  executor.record(stream, event);
  EXPECT_EQ(model.report(0).host, 300);
}

}  // namespace
}  // namespace vnpu::timing
