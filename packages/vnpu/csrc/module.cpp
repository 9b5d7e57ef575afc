// The Python view of the device: settings and state of this process.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device/configuration.h"
#include "device/fault_plan.h"
#include "device/graph.h"
#include "device/host_counts.h"
#include "device/memory.h"
#include "device/memory_watch.h"
#include "device/system.h"
#include "interface/status.h"
#include "module_timing.h"
#include "module_triton.h"
#include "race/detector.h"
#include "timing/model.h"
#include "trace/recorder.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "State of this process's virtual NPUs.";
  m.def("device_count", [] { return vnpu::System::device_count(); });
  m.def("can_fork", [] {
    // A forked child ends without what observers write at the end of a process.
    return !vnpu::System::is_open() && !vnpu::trace::Recorder::is_wanted() &&
           !vnpu::timing::Model::is_wanted() &&
           vnpu::Configuration::of_environment().races == vnpu::RaceMode::kOff;
  });
  m.def("check_fault_plan", [](const std::string& plan) { vnpu::faults::Plan::parse(plan); });
  m.def("fault_plan_reaches_host", [](const std::string& text) {
    const vnpu::faults::Plan plan = vnpu::faults::Plan::parse(text);
    return plan.is_of_host() || !plan.count_directory.empty();
  });
  m.def("soc_name", [] { return vnpu::Configuration::instance().soc_name; });
  m.def("schedule", [] {
    const vnpu::Configuration& configuration = vnpu::Configuration::instance();
    switch (configuration.schedule) {
      case vnpu::SchedulePolicy::kEager: return std::string("eager");
      case vnpu::SchedulePolicy::kThreads: return std::string("threads");
      case vnpu::SchedulePolicy::kFuzz: return "fuzz:" + std::to_string(configuration.seed);
    }
    throw std::logic_error("vnpu: a schedule policy without a name");
  });
  m.def("computes", [] { return vnpu::Configuration::instance().compute; });
  m.def("is_traced", [] {
    const auto* model = vnpu::timing::Model::instance();
    return vnpu::trace::Recorder::instance() != nullptr ||
           (model != nullptr && model->writes_timeline());
  });
  m.def("name_stream", [](uintptr_t handle, const std::string& name) {
    const vnpu::StreamPtr& stream = vnpu::abi::stream_of(reinterpret_cast<void*>(handle));
    if (auto* recorder = vnpu::trace::Recorder::instance()) recorder->name_stream(*stream, name);
    if (auto* model = vnpu::timing::Model::instance()) model->name_stream(*stream, name);
  });
  m.def("label_launches", [](const std::string& label) {
    if (auto* recorder = vnpu::trace::Recorder::instance()) recorder->label_launches(label);
    if (auto* model = vnpu::timing::Model::instance()) model->label_launches(label);
  });
  m.def("host_counts", [] {
    const vnpu::HostCounts& counts = vnpu::HostCounts::instance();
    py::dict result;
    result["launches"] = counts.launches.load();
    result["synchronizations"] = counts.synchronizations.load();
    result["copies_to_host"] = counts.copies_to_host.load();
    return result;
  });
  m.def("graph_holdings", [] {
    const vnpu::GraphHoldings held = vnpu::Graph::held_by_all();
    py::dict result;
    result["graphs"] = held.graphs;
    result["streams"] = held.streams;
    result["events"] = held.events;
    result["updatable_tasks"] = held.updatable_tasks;
    return result;
  });
  m.def("races_found", [] {
    const vnpu::race::Detector* const detector = vnpu::race::Detector::instance();
    return detector == nullptr ? 0 : detector->found();
  });
  m.def("is_watched", [](uintptr_t address, size_t bytes) {
    return vnpu::MemoryWatch::instance().watches({address, address + bytes});
  });
  m.def("memory_bytes", [] { return vnpu::Configuration::instance().memory_bytes; });
  vnpu::bind_timing(m);
  vnpu::bind_triton(m);
}
