// Ranks of several hosts meet through vllm_davinci.vnpu.hosts, in this process's interpreter. It
// makes gloo's process group, for which torch has no C++ headers.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "carrier/gloo_carrier.h"
#include "collective/meeting.h"
#include "device/failure.h"

namespace vnpu {
namespace {

namespace py = pybind11;

FailureKind kind_of(const py::error_already_set& error) {
  if (error.matches(PyExc_TimeoutError)) return FailureKind::kRemoteTimeout;
  if (error.matches(PyExc_ConnectionError)) return FailureKind::kRemoteLost;
  if (error.matches(PyExc_ValueError)) return FailureKind::kInvalidArgument;
  return FailureKind::kInternal;
}

// Calls a function of the module, from a thread that may or may not hold the interpreter's lock.
template <class Body>
auto in_python(const Body& body) {
  const py::gil_scoped_acquire lock;
  try {
    return body(py::module_::import("vllm_davinci.vnpu.hosts.meeting"));
  } catch (const py::error_already_set& error) {
    const std::string text = py::str(error.value());
    throw Failure(kind_of(error), "vnpu: " + text);
  }
}

py::bytes secret_of(const MeetingPoint& point) {
  return py::bytes(reinterpret_cast<const char*>(point.secret), sizeof(point.secret));
}

MeetingPoint point_of(const py::tuple& point) {
  MeetingPoint made{};
  const auto address = point[0].cast<std::string>();
  const auto secret = point[2].cast<std::string>();
  if (address.size() >= sizeof(made.address) || secret.size() != sizeof(made.secret)) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: '" + address + "' is not the address of a host.");
  }
  std::memcpy(made.address, address.data(), address.size());
  made.port = point[1].cast<uint32_t>();
  std::memcpy(made.secret, secret.data(), sizeof(made.secret));
  return made;
}

class PythonMeetingRoom final : public MeetingRoom {
 public:
  MeetingPoint open() override {
    return in_python(
        [](const py::module_& module) { return point_of(module.attr("open_point")()); });
  }
  std::vector<std::string> exchange(const MeetingPoint& point, uint32_t ranks, uint32_t rank,
                                    const std::string& own, std::chrono::seconds limit) override {
    return in_python([&](const py::module_& module) {
      return module
          .attr("exchange")(point.address, point.port, secret_of(point), ranks, rank,
                            py::bytes(own), limit.count())
          .cast<std::vector<std::string>>();
    });
  }
  std::shared_ptr<Carrier> connect(const MeetingPoint& point, uint32_t ranks, uint32_t rank,
                                   const std::vector<uint32_t>& peers,
                                   std::chrono::seconds limit) override {
    return in_python([&](const py::module_& module) -> std::shared_ptr<Carrier> {
      const py::tuple group = module.attr("connect")(point.address, point.port, secret_of(point),
                                                     ranks, rank, peers, limit.count());
      return std::make_shared<GlooCarrier>(group[0].cast<std::string>());
    });
  }
  RankTable read_table(const std::string& path, uint32_t rank) override {
    return in_python([&](const py::module_& module) {
      const py::tuple read = module.attr("open_table")(path, rank);
      return RankTable{read[0].cast<uint32_t>(), point_of(read[1])};
    });
  }
};

}  // namespace
}  // namespace vnpu

extern "C" __attribute__((visibility("default"))) vnpu::MeetingRoom* vnpu_meeting_room() {
  static auto* const room = new vnpu::PythonMeetingRoom();
  return room;
}
