// The model of this process, as its environment asks for it.

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "device/failure.h"
#include "timing/model.h"

namespace vnpu::timing {
namespace {

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

std::unique_ptr<TimelineFile> timeline_of_environment(const std::string& machine) {
  const char* directory = variable("VNPU_TIMELINE");
  if (directory == nullptr) return nullptr;
  if (::access(directory, W_OK | X_OK) != 0) {
    throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: VNPU_TIMELINE='") + directory +
                                                     "' is not valid: " + std::strerror(errno) +
                                                     ". Expected a directory that can be written.");
  }
  return std::make_unique<TimelineFile>(
      std::string(directory) + "/" + std::to_string(::getpid()) + ".timeline.json", machine);
}

std::unique_ptr<PacedClock> paced_of_environment() {
  const char* text = variable("VNPU_PACED");
  if (text == nullptr) return nullptr;
  char* end = nullptr;
  const double scale = std::strtod(text, &end);
  if (*end != '\0' || !(scale > 0) || scale > 1e6) {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: VNPU_PACED='") + text +
                      "' is not valid. Expected this host's seconds for a modelled one, as in 1 or "
                      "4.");
  }
  return std::make_unique<PacedClock>(scale);
}

// Prints the sum of late waits when the process exits.
void tell_lateness(const PacedClock& paced) {
  const PacedClock::Lateness lateness = paced.lateness();
  if (lateness.late == 0) return;
  std::fprintf(stderr,
               "vnpu: paced at %g: %lld of %lld waits ended later than modelled, by %.3f s in all "
               "and %.3f ms at most (modelled).\n",
               paced.scale(), static_cast<long long>(lateness.late),
               static_cast<long long>(lateness.waits), static_cast<double>(lateness.total) * 1e-12,
               static_cast<double>(lateness.greatest) * 1e-9);
}

Model* start(const char* figures) {
  const char* name = variable("VNPU_MACHINE");
  const std::string machine = name == nullptr ? "a machine without a name" : name;
  static Model* const model =
      new Model(Machine(figures), timeline_of_environment(machine), paced_of_environment());
  std::atexit([] {
    try {
      model->write_timeline();
    } catch (const Failure& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
    }
    if (model->paced() != nullptr) tell_lateness(*model->paced());
  });
  return model;
}

}  // namespace

bool Model::is_wanted() { return variable("VNPU_TIMING") != nullptr; }

Model* Model::instance() {
  static Model* const model = [] {
    const char* figures = variable("VNPU_TIMING");
    return figures == nullptr ? nullptr : start(figures);
  }();
  return model;
}

}  // namespace vnpu::timing
