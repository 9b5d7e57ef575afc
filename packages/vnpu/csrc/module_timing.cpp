#include "module_timing.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "device/system.h"
#include "timing/machine.h"
#include "timing/model.h"
#include "timing/simulation.h"
#include "timing/variants.h"

namespace py = pybind11;

namespace vnpu {
namespace {

using timing::Kind;
using timing::kResources;
using timing::Resource;
using timing::Time;

timing::Model& model() {
  timing::Model* const model = timing::Model::instance();
  if (model == nullptr) {
    throw std::runtime_error(
        "vnpu: this process models no time. Start it with `vnpu run --chip NAME -- COMMAND`.");
  }
  return *model;
}

py::dict busy_by_name(const timing::Busy& busy) {
  py::dict result;
  for (size_t r = 0; r < kResources; ++r) {
    result[timing::name_of(static_cast<Resource>(r))] = busy[r];
  }
  return result;
}

int current_device() { return std::max(System::current_device(), 0); }

py::dict fields_of(const timing::Model::Report& report) {
  py::dict result;
  result["host_ps"] = report.host;
  result["waited_ps"] = report.waited;
  result["any_ps"] = report.usage.any;
  result["compute_ps"] = report.usage.compute;
  result["communication_ps"] = report.usage.communication;
  result["overlapped_ps"] = report.usage.both;
  result["compute_alone_ps"] = report.usage.compute_alone;
  result["communication_alone_ps"] = report.usage.communication_alone;
  result["busy_ps"] = busy_by_name(report.usage.busy);
  return result;
}

py::dict report() {
  const int device = current_device();
  timing::Model::Report report;
  System::instance().executor().look([&] { report = model().report(device); });
  return fields_of(report);
}

py::dict variant_reports() {
  py::dict result;
  timing::Variants* const variants = timing::Variants::instance();
  if (variants == nullptr) return result;
  const int device = current_device();
  std::vector<std::pair<std::string, timing::Model::Report>> reports;
  System::instance().executor().look([&] { reports = variants->reports(device); });
  for (const auto& [name, report] : reports) result[name.c_str()] = fields_of(report);
  return result;
}

// (waits, late waits, modelled ps late in total, at most); None without pacing.
py::object lateness() {
  const timing::PacedClock* const paced = model().paced();
  if (paced == nullptr) return py::none();
  const timing::PacedClock::Lateness late = paced->lateness();
  return py::make_tuple(late.waits, late.late, late.total, late.greatest);
}

// (stream, launched, phases of (fixed, {resource: ps}), records waited for, turn, lateness)
using PlannedPhase = std::tuple<Time, std::map<std::string, Time>>;
using Planned = std::tuple<int, Time, std::vector<PlannedPhase>, std::vector<size_t>, int, Time>;

std::vector<std::pair<Time, Time>> simulate(const std::vector<Planned>& tasks, size_t queues,
                                            Time change) {
  static const char turns[256] = {};
  std::vector<std::pair<Time, Time>> times(tasks.size());
  timing::Simulation simulation(
      [&](const timing::Span& span) {
        if (span.record == 0) times[span.label] = {span.begin, span.end};
      },
      nullptr, {queues, change});
  std::vector<uint64_t> records;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const auto& [stream, launched, phases, after, turn, lateness] = tasks[i];
    for (const size_t earlier : after) {
      simulation.wait(0, stream, records.at(earlier), nullptr, launched);
    }
    auto plan = std::make_shared<timing::Plan>();
    plan->turn = turn == 0 ? nullptr : &turns[turn];
    plan->lateness = lateness;
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
  module.def("is_modelled", [] { return timing::Model::instance() != nullptr; });
  module.def("modelled_report", &report);
  module.def("variant_reports", &variant_reports);
  module.def("set_routed_share", [](int64_t numerator, int64_t denominator) {
    model().set_routed_share(numerator, denominator);
  });
  module.def("place_group", [](const std::string& name, const std::vector<int64_t>& ranks) {
    System::instance().executor().look([&] {
      model().place_group(name, ranks);
      if (auto* variants = timing::Variants::instance()) variants->place_group(name, ranks);
    });
  });
  module.def("pass_host_step", [](int64_t requests, bool beside_device) {
    System::instance().executor().look([&] {
      model().pass_host_step(requests, beside_device);
      if (auto* variants = timing::Variants::instance()) {
        variants->pass_host_step(requests, beside_device);
      }
    });
  });
  module.def("write_timeline", [] { model().write_timeline(); });
  module.def("restart_timeline", [] {
    System::instance().executor().look([] { model().restart_timeline(current_device()); });
  });
  module.def("lateness", &lateness);
  module.def("figure_names", [] { return timing::Machine::figure_names(); });
  // queues: hardware queues of the device, 0: as many as streams; change: to turn one to a stream
  module.def("simulate", &simulate, py::arg("tasks"), py::arg("queues") = 0, py::arg("change") = 0);
}

}  // namespace vnpu
