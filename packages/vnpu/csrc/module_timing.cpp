#include "module_timing.h"

#include <pybind11/stl.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "timing/machine.h"
#include "timing/simulation.h"

namespace py = pybind11;

namespace vnpu {
namespace {

using timing::kResources;
using timing::Resource;
using timing::Time;

// (stream, launched, phases of (fixed, {resource: ps}), records waited for, turn)
using PlannedPhase = std::tuple<Time, std::map<std::string, Time>>;
using Planned = std::tuple<int, Time, std::vector<PlannedPhase>, std::vector<size_t>, int>;

std::vector<std::pair<Time, Time>> simulate(const std::vector<Planned>& tasks) {
  static const char turns[256] = {};
  std::vector<std::pair<Time, Time>> times(tasks.size());
  timing::Simulation simulation([&](const timing::Span& span) {
    if (span.record == 0) times[span.label] = {span.begin, span.end};
  });
  std::vector<uint64_t> records;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const auto& [stream, launched, phases, after, turn] = tasks[i];
    for (const size_t earlier : after) {
      simulation.wait(0, stream, records.at(earlier), nullptr, launched);
    }
    auto plan = std::make_shared<timing::Plan>();
    plan->turn = turn == 0 ? nullptr : &turns[turn];
    for (const auto& [fixed, busy] : phases) {
      timing::Phase& phase = plan->phases.emplace_back();
      phase.fixed = fixed;
      for (size_t r = 0; r < kResources; ++r) {
        const auto found = busy.find(timing::name_of(static_cast<Resource>(r)));
        if (found != busy.end()) phase.busy[r] = found->second;
      }
    }
    simulation.launch(0, stream, plan, launched, static_cast<uint32_t>(i));
    records.push_back(simulation.record(0, stream, nullptr, launched));
  }
  simulation.finish_device(0);
  return times;
}

}  // namespace

void bind_timing(py::module_& module) {
  module.def("figure_names", [] { return timing::Machine::figure_names(); });
  module.def("simulate", &simulate);
}

}  // namespace vnpu
