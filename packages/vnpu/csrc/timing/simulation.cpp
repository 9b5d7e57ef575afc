#include "timing/simulation.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "device/failure.h"

namespace vnpu::timing {
namespace {

using Wide = unsigned __int128;

constexpr size_t kRemembered = 4096;  // records whose time is kept

// Records and waits take their dependencies from the tasks around them.
bool needs_queue(const PlanPtr& plan) { return plan != nullptr && plan->kind != Kind::kEvent; }

}  // namespace

Time Plan::alone() const {
  return std::accumulate(phases.begin(), phases.end(), Time{0},
                         [](Time sum, const Phase& phase) { return sum + phase.alone(); });
}

Simulation::Stream& Simulation::stream_of(int device, int id) {
  Stream& stream = streams_[id];
  stream.device = device;
  stream.id = id;
  return stream;
}

void Simulation::push(int device, int stream, Item item) {
  if (item.launched < now_) {
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: ") + (item.plan == nullptr ? "an event" : item.plan->name) +
                      " is launched at " + std::to_string(item.launched) +
                      " ps, before the modelled device's time of " + std::to_string(now_) +
                      " ps. This is a defect of the timing model.");
  }
  stream_of(device, stream).items.push_back(std::move(item));
}

void Simulation::launch(int device, int stream, PlanPtr plan, Time launched, uint32_t label) {
  Item item{std::move(plan), launched, label};
  if (item.plan->turn != nullptr) item.ticket = turns_[item.plan->turn].tickets++;
  push(device, stream, std::move(item));
}

uint64_t Simulation::record(int device, int stream, PlanPtr plan, Time launched) {
  reached_.emplace_back();
  const uint64_t record = forgotten_ + reached_.size();
  push(device, stream, {std::move(plan), launched, 0, record});
  return record;
}

void Simulation::wait(int device, int stream, uint64_t record, PlanPtr plan, Time launched) {
  push(device, stream, {std::move(plan), launched, 0, record, true});
}

bool Simulation::reached(uint64_t record) const {
  return record <= forgotten_ || reached_[record - forgotten_ - 1].time >= 0;
}

Time Simulation::time_of(uint64_t record) const {
  return record <= forgotten_ ? -1 : reached_[record - forgotten_ - 1].time;
}

bool Simulation::is_phase_over(const Stream& stream) {
  return stream.running && stream.fixed_left == 0 && stream.work_left == 0;
}

bool Simulation::try_begin(Stream& stream) {
  if (stream.running || stream.items.empty()) return false;
  const Item& head = stream.items.front();
  if (head.launched > now_) return false;
  if (head.waits && !reached(head.record)) return false;
  const void* const turn = head.plan == nullptr ? nullptr : head.plan->turn;
  if (turn != nullptr && turns_[turn].over != head.ticket) return false;
  const std::optional<Time> change =
      needs_queue(head.plan) ? queues_.take(stream.device, stream.id) : Time{0};
  if (!change) return false;
  stream.running = true;
  stream.begun = now_;
  stream.phase = 0;
  stream.waited = 0;
  running_.push_back(&stream);
  enter_phase(stream);
  stream.fixed_left += *change;
  if (turn != nullptr) await_ranks(stream, head, now_ + *change);
  return true;
}

void Simulation::await_ranks(Stream& stream, const Item& head, Time from) {
  const size_t group = arrivals_.group_of(stream.device, head.plan->turn);
  stream.waited = Arrivals::wait_for_last(head.plan->lateness, stream.way.tasks[group],
                                          std::max(stream.way.ready, head.launched), from);
  stream.fixed_left += stream.waited;
  arrivals_.meet(stream.device, group, stream.way);
}

void Simulation::enter_phase(Stream& stream) {
  speeds_known_ = false;
  stream.fixed_left = 0;
  stream.work_left = 0;
  stream.shares = {};
  const Plan* const plan = stream.items.front().plan.get();
  if (plan == nullptr || stream.phase >= plan->phases.size()) return;
  const Phase& phase = plan->phases[stream.phase];
  stream.fixed_left = phase.fixed;
  stream.work_left = static_cast<Wide>(phase.work()) * kWhole;
  stream.shares = shares_of(phase);
}

void Simulation::end_head(Stream& stream) {
  Item item = std::move(stream.items.front());
  stream.items.pop_front();
  stream.running = false;
  stream.ended = now_;
  std::erase(running_, &stream);
  speeds_known_ = false;
  if (item.waits && item.record > forgotten_) {
    stream.way.join(reached_[item.record - forgotten_ - 1].way);
  }
  if (item.record != 0 && !item.waits) {
    reached_[item.record - forgotten_ - 1] = {now_, stream.way};
    while (reached_.size() > kRemembered && reached_.front().time >= 0) {
      reached_.pop_front();
      ++forgotten_;
    }
  }
  if (item.plan == nullptr) return;
  if (needs_queue(item.plan)) queues_.release(stream.device, stream.id, now_);
  if (item.plan->turn != nullptr) {
    ++turns_[item.plan->turn].over;
    stream.way.ready = now_;
  } else if (item.plan->kind != Kind::kEvent) {
    stream.way.add_task(now_);
  }
  Usage& usage = usages_[stream.device];
  for (const Phase& phase : item.plan->phases) {
    for (size_t r = 0; r < kResources; ++r) usage.busy[r] += phase.busy[r];
  }
  if (item.plan->kind == Kind::kCompute) usage.compute_alone += item.plan->alone();
  if (item.plan->kind == Kind::kCommunication) {
    usage.communication_alone += item.plan->alone() + stream.waited;
  }
  if (on_end_ != nullptr) {
    on_end_({item.plan, stream.device, stream.id, item.launched, stream.begun, now_, stream.waited,
             item.label, item.record, item.waits});
  }
}

void Simulation::settle() {
  for (bool again = true; again;) {
    again = false;
    for (auto& [id, stream] : streams_) {
      while (try_begin(stream) || is_phase_over(stream)) {
        again = true;
        if (!is_phase_over(stream)) break;
        const Plan* const plan = stream.items.front().plan.get();
        if (plan != nullptr && ++stream.phase < plan->phases.size()) {
          enter_phase(stream);
        } else {
          end_head(stream);
        }
      }
    }
  }
}

void Simulation::find_speeds() {
  if (speeds_known_) return;
  speeds_known_ = true;
  std::map<int, std::vector<Stream*>> working;  // by device
  for (Stream* stream : running_) {
    stream->speed = 0;
    if (stream->fixed_left == 0) working[stream->device].push_back(stream);
  }
  std::vector<const Shares*> shares;
  std::vector<uint64_t> speeds;
  for (auto& [device, streams] : working) {
    shares.clear();
    for (const Stream* stream : streams) shares.push_back(&stream->shares);
    speeds_of(shares, speeds);
    for (size_t i = 0; i < streams.size(); ++i) streams[i]->speed = speeds[i];
  }
  if (on_use_ == nullptr) return;
  for (const auto& [device, streams] : working) uses_.try_emplace(device);
  for (const auto& [device, use] : uses_) {
    const auto found = working.find(device);
    tell_use(device, found == working.end() ? std::vector<Stream*>() : found->second);
  }
}

void Simulation::tell_use(int device, const std::vector<Stream*>& working) {
  Shares use = {};
  for (const Stream* stream : working) {
    for (size_t r = 0; r < kResources; ++r) {
      use[r] +=
          static_cast<uint64_t>(static_cast<Wide>(stream->speed) * stream->shares[r] / kWhole);
    }
  }
  Shares& told = uses_[device];
  if (use == told) return;
  told = use;
  on_use_(device, now_, use);
}

Time Simulation::next_change() const {
  Time next = kNever;
  for (const Stream* stream : running_) {
    if (stream->fixed_left > 0) {
      next = std::min(next, now_ + stream->fixed_left);
    } else if (stream->speed > 0) {
      const Wide time = (stream->work_left + stream->speed - 1) / stream->speed;
      next = std::min(next, now_ + static_cast<Time>(time));
    }
  }
  for (const auto& [id, stream] : streams_) {
    if (stream.running || stream.items.empty()) continue;
    if (stream.items.front().launched > now_) {
      next = std::min(next, stream.items.front().launched);
    }
  }
  return next;
}

void Simulation::move_to(Time time) {
  const Time passed = time - now_;
  now_ = time;
  if (passed == 0) return;
  std::map<int, std::array<bool, 3>> busy;  // by device: compute, communication, any
  for (Stream* stream : running_) {
    const Plan* const plan = stream->items.front().plan.get();
    std::array<bool, 3>& kinds = busy[stream->device];
    kinds[2] = true;
    if (plan != nullptr) {
      kinds[0] |= plan->kind == Kind::kCompute;
      kinds[1] |= plan->kind == Kind::kCommunication;
    }
    if (stream->fixed_left > 0) {
      stream->fixed_left -= passed;
      if (stream->fixed_left == 0) speeds_known_ = false;
    } else {
      const Wide done = static_cast<Wide>(stream->speed) * static_cast<Wide>(passed);
      stream->work_left -= std::min(stream->work_left, done);
    }
  }
  for (const auto& [device, kinds] : busy) {
    Usage& usage = usages_[device];
    if (kinds[0]) usage.compute += passed;
    if (kinds[1]) usage.communication += passed;
    if (kinds[0] && kinds[1]) usage.both += passed;
    usage.any += passed;
  }
}

bool Simulation::step(Time until) {
  settle();
  find_speeds();
  const Time next = next_change();
  if (next > until) return false;
  move_to(next);
  settle();
  return true;
}

void Simulation::advance(Time until) {
  while (step(until)) {
  }
  if (until > now_) move_to(until);
}

}  // namespace vnpu::timing
