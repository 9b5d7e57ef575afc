#include "triton/kernel_task.h"

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "device/configuration.h"
#include "device/core_limits.h"
#include "device/system.h"

namespace vnpu::triton {
namespace {

Settings settings_of(const Configuration& configuration) {
  static std::atomic<uint64_t> launches{0};
  const bool is_fuzzed = configuration.schedule == SchedulePolicy::kFuzz;
  return {.poisons = configuration.strict,
          .shuffles = is_fuzzed,
          .seed = is_fuzzed ? configuration.seed * 0x9e3779b97f4a7c15 + launches.fetch_add(1) : 0,
          .others_may_write = configuration.schedule == SchedulePolicy::kThreads,
          .limit = std::chrono::milliseconds(
              static_cast<int64_t>(configuration.wait_limit_seconds * 1000))};
}

std::string describe(const AccessLog::Entry& entry, const std::array<uint32_t, 3>& grid) {
  const auto [x, y, z] = coordinates(entry.program, grid);
  return "\n    " + std::string(entry.write ? "write" : "read") + " by program (" +
         std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + "), " +
         entry.instruction->place;
}

}  // namespace

KernelTask::KernelTask(Launch launch, const std::vector<int64_t>& tensor_bytes, bool is_captured)
    : Task(launch.program->name.c_str()), launch_(std::move(launch)) {
  cores = core_limits::of_launch();
  if (keeps_work) work = std::make_shared<timing::Work>(work_of(launch_, tensor_bytes));
  if (!Touched::keeps_accesses) return;
  tells_accesses = !is_captured;
  if (!is_captured) return;
  for (size_t i = 0; i < launch_.storages.size(); ++i) {
    const auto [begin, end] = launch_.storages[i];
    const Parameter& parameter = launch_.program->parameters[i];
    if (end == 0 || begin == end) continue;
    if (parameter.reads) touched.add({begin, end, false});
    if (parameter.writes) touched.add({begin, end, true});
  }
}

Progress KernelTask::advance() {
  const Configuration& configuration = Configuration::instance();
  if (!configuration.compute) return Progress::kDone;
  AccessLog log;
  Machine machine(launch_, settings_of(configuration), Touched::keeps_accesses ? &log : nullptr);
  try {
    machine.run();
  } catch (...) {
    tell(log, true);
    throw;
  }
  tell(log, false);
  return Progress::kDone;
}

void KernelTask::tell(const AccessLog& log, bool has_failed) {
  if (!Touched::keeps_accesses) return;
  if (tells_accesses) {
    const auto accesses = log.accesses(launch_.grid);
    System::instance().executor().tell(&Observer::on_accessed, static_cast<const Task&>(*this),
                                       accesses);
  }
  const Configuration& configuration = Configuration::instance();
  const bool is_checked = !has_failed && !launch_.program->synchronizes;
  if (!is_checked || configuration.races == RaceMode::kOff) return;
  const auto conflict = log.conflict();
  if (!conflict.has_value()) return;
  const uintptr_t at = std::max(conflict->first.begin, conflict->second.begin);
  const std::string text =
      "vnpu: race between programs of Triton kernel " + launch_.program->name + " on " +
      Memory::instance().describe(reinterpret_cast<const void*>(at)) +
      describe(conflict->first, launch_.grid) + describe(conflict->second, launch_.grid) +
      "\n  Programs of a grid have no order on a chip. Give each its own elements, use an atomic "
      "operation, or launch the second part as another kernel.";
  System::instance().executor().tell(&Observer::on_race, text);
}

// Loads and stores count once per program; in a loop, once per iteration, assuming as many
// iterations as the kernel's tensors have bytes for, because the bounds are known only at run time.
timing::Work work_of(const Launch& launch, const std::vector<int64_t>& tensor_bytes) {
  const Program& program = *launch.program;
  const int64_t programs = int64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  timing::Work work;
  work.wide = true;
  work.read_bytes = program.loaded_bytes * programs;
  work.written_bytes = program.stored_bytes * programs;
  int64_t turns = 1;
  if (program.has_loops) {
    int64_t bytes = 0;
    for (size_t i = 0; i < tensor_bytes.size(); ++i) {
      bytes += (program.parameters[i].reads + program.parameters[i].writes) * tensor_bytes[i];
    }
    const int64_t once = std::max<int64_t>(1, work.read_bytes + work.written_bytes);
    turns = std::max<int64_t>(1, (bytes + once - 1) / once);
  }
  work.read_bytes *= turns;
  work.written_bytes *= turns;
  work.vector_operations = program.operations * programs * turns;
  work.products = program.products;
  for (timing::MatrixProduct& each : work.products) each.batch *= programs * turns;
  if (!work.products.empty()) work.kind = timing::Work::Class::kMatmul;
  return work;
}

}  // namespace vnpu::triton
