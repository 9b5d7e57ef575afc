// Simulating until something is done.

#include <algorithm>
#include <string>

#include "device/failure.h"
#include "timing/simulation.h"

namespace vnpu::timing {

template <class Done>
void Simulation::run_until(Done done, const char* what) {
  settle();
  while (!done()) {
    if (!step(kNever - 1)) {
      throw Failure(FailureKind::kInternal,
                    std::string("vnpu: ") + what +
                        " never gets done on the modelled device: " + stuck() + ".");
    }
  }
}

std::string Simulation::stuck() const {
  std::string text;
  for (const auto& [id, stream] : streams_) {
    if (stream.items.empty()) continue;
    const Item& head = stream.items.front();
    if (!text.empty()) text += "; ";
    text += "stream " + std::to_string(id) + " waits at ";
    text += head.waits ? "record " + std::to_string(head.record)
                       : std::string(head.plan == nullptr ? "an event" : head.plan->name);
  }
  return text.empty() ? "nothing is queued" : text;
}

Time Simulation::finish_stream(int id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return now_;
  const Stream& stream = found->second;
  run_until([&] { return stream.items.empty(); }, "a stream");
  return stream.ended;
}

Time Simulation::finish_record(uint64_t record) {
  run_until([&] { return reached(record); }, "the record of an event");
  return time_of(record);
}

Time Simulation::finish_device(int device) {
  Time ended = 0;
  for (const auto& [id, stream] : streams_) {
    if (stream.device == device) ended = std::max(ended, finish_stream(id));
  }
  return ended;
}

bool Simulation::is_idle() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& stream) { return stream.second.items.empty(); });
}

size_t Simulation::queued(int id) const {
  const auto found = streams_.find(id);
  return found == streams_.end() ? 0 : found->second.items.size();
}

Time Simulation::make_room(int id, size_t depth) {
  run_until([&] { return queued(id) < depth; }, "room in a stream's queue");
  return now_;
}

}  // namespace vnpu::timing
