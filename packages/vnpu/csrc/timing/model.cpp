#include "timing/model.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "collective/collective.h"
#include "collective/transfers.h"
#include "device/event.h"
#include "device/failure.h"
#include "device/graph.h"
#include "device/memory.h"
#include "device/stream.h"
#include "device/traffic.h"

namespace vnpu::timing {
namespace {

using Wide = unsigned __int128;

constexpr int kFirstSideStream = 1'000'000;

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

// At the process's end, for those who read only that.
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

// Until when the wait that this thread is in lasts, on the modelled clock.
thread_local Time waited_until = 0;

bool is_in_memory_of_devices(const Access& access) {
  return Memory::instance().is_device_address(reinterpret_cast<const void*>(access.begin));
}

Exchange exchange_of(std::string_view name) {
  if (name == "all_reduce" || name == "reduce") return Exchange::kAllReduce;
  if (name.starts_with("reduce_scatter")) return Exchange::kReduceScatter;
  if (name.starts_with("all_gather")) return Exchange::kAllGather;
  if (name == "barrier") return Exchange::kBarrier;
  if (name == "broadcast" || name == "scatter") return Exchange::kBroadcast;
  return Exchange::kAllToAll;
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

Model::Model(Machine machine, std::unique_ptr<TimelineFile> timeline,
             std::unique_ptr<PacedClock> paced)
    : machine_(std::move(machine)),
      simulation_([this](const Span& span) { on_end(span); },
                  timeline == nullptr
                      ? Simulation::OnUse()
                      : [this](int device, Time now,
                               const Shares& use) { timeline_->add_use(device, now, use); },
                  {static_cast<size_t>(machine_.hardware_queues()), machine_.queue_change()}),
      timeline_(std::move(timeline)),
      paced_(std::move(paced)),
      record_plan_(event_plan("event record", machine_.event_record())),
      wait_plan_(event_plan("event wait", machine_.event_wait())) {}

void Model::on_end(const Span& span) {
  if (timeline_ != nullptr) timeline_->add(span);
  if (span.record == 0 || span.waits) return;
  const auto event = events_.find(span.record);
  if (event == events_.end()) return;
  if (records_[event->second] == span.record) times_[event->second] = span.end;
  events_.erase(event);
}

PlanPtr Model::event_plan(const char* name, Time fixed) const {
  auto plan = std::make_shared<Plan>();
  plan->name = name;
  plan->kind = Kind::kEvent;
  plan->phases = {{.fixed = fixed}};
  return plan;
}

Cache& Model::cache_of(int device) {
  return caches_.try_emplace(device, machine_.l2_bytes()).first->second;
}

int64_t Model::use_cache(const Task& task, int device) {
  Cache& cache = cache_of(device);
  Wide all_read = 0;
  Wide all_written = 0;
  for (const Access& access : task.touched.accesses()) {
    (access.write ? all_written : all_read) += static_cast<Wide>(bytes_of(access));
  }
  // A cost may have said that only a part is read or written: some experts, some rows of a cache.
  const Wide read = std::min(all_read, static_cast<Wide>(task.work->read_bytes));
  const Wide written = std::min(all_written, static_cast<Wide>(task.work->written_bytes));
  // What of a range is touched is taken for its first bytes when it stays. Whoever touches a part
  // of the same range later finds those, and of what came otherwise, such as weights that were
  // fetched before their experts were chosen, as much as is in any part.
  const auto touched = [&](const Access& access) {
    const auto range = static_cast<Wide>(access.end - access.begin);
    const Wide all = access.write ? all_written : all_read;
    return static_cast<uintptr_t>(all == 0 ? 0 : range * (access.write ? written : read) / all);
  };
  Wide there = 0;
  const auto count = [&](const Access& access, const Cache::Found& found) {
    // What is read of a strided tensor is as much there as the range that it lies in.
    const auto range = static_cast<Wide>(access.end - access.begin);
    const auto part = static_cast<Wide>(touched(access));
    Wide bytes = static_cast<Wide>(found.bytes - found.touched);
    if (part > 0) bytes += static_cast<Wide>(found.touched) * range / part;
    there += static_cast<Wide>(bytes_of(access)) * std::min(bytes, range) / range;
    awaited_.insert(awaited_.end(), found.arrivals.begin(), found.arrivals.end());
  };
  // Before any is used: two of them may lie in one range, by turns.
  const std::vector<Access>& accesses = task.touched.accesses();
  const auto is_part = [&](const Access& access) {
    return touched(access) < access.end - access.begin;
  };
  for (const Access& access : accesses) {
    if (!access.write && is_part(access)) count(access, cache.find(access.begin, access.end));
  }
  for (const bool writes : {false, true}) {
    for (const Access& access : accesses) {
      if (access.write != writes || access.end == access.begin) continue;
      if (is_part(access)) {
        cache.touch(access.begin, touched(access));
        continue;
      }
      const Cache::Found found = cache.use(access.begin, access.end);
      if (!writes) count(access, found);
    }
  }
  return all_read == 0 ? 0 : static_cast<int64_t>(read * std::min(there, all_read) / all_read);
}

void Model::place_group(const std::string& name, const std::vector<int64_t>& ranks) {
  placed_[name] = ranks;
  std::sort(placed_[name].begin(), placed_[name].end());
}

void Model::prefetch(const Stream& stream, const void* address, size_t bytes) {
  if (stream.capture != nullptr) {
    captured_[stream.capture->id].push_back({.what = Captured::What::kPrefetch,
                                             .stream = stream.id,
                                             .number = reinterpret_cast<uintptr_t>(address),
                                             .bytes = bytes});
    return;
  }
  host_ += machine_.host().event_call;
  make_room(stream.id);
  launch_prefetch(stream.device, stream.id, reinterpret_cast<uintptr_t>(address), bytes);
}

void Model::launch(int device, int stream, PlanPtr plan) {
  for (const uint64_t record : awaited_) simulation_.wait(device, stream, record, nullptr, host_);
  awaited_.clear();
  simulation_.launch(device, stream, std::move(plan), host_, label_);
}

void Model::launch_prefetch(int device, int stream, uintptr_t begin, size_t bytes) {
  const uint64_t arrival = simulation_.next_record();
  const int64_t there = cache_of(device).bring(begin, begin + bytes, arrival);
  auto plan = std::make_shared<Plan>();
  plan->name = "prefetch";
  plan->kind = Kind::kCopy;
  plan->bytes = bytes;
  plan->phases = machine_.phases_of_prefetch(static_cast<int64_t>(bytes) - there);
  launch(device, stream, std::move(plan));
  simulation_.record(device, stream, nullptr, host_);
}

PlanPtr Model::plan_of(const Task& task, int device) {
  auto plan = std::make_shared<Plan>();
  plan->name = task.name;
  const Traffic traffic = traffic_of(task);
  plan->bytes = traffic.read + traffic.written;
  const std::string_view name = task.name;
  if (const auto* collective = dynamic_cast<const vnpu::Collective*>(&task)) {
    plan->kind = Kind::kCommunication;
    plan->turn = collective->member().get();
    // Experts' exchanges are operators, whose rows know what is sent.
    const int64_t bytes = task.work != nullptr
                              ? task.work->read_bytes
                              : static_cast<int64_t>(std::max(traffic.read, traffic.written));
    const auto placed = placed_.find(collective->member()->name());
    const bool is_placed = placed != placed_.end() && placed->second.size() > 1;
    const int64_t ranks = collective->member()->ranks();
    const Collective exchange{.exchange = exchange_of(name),
                              .bytes = bytes,
                              .ranks = ranks,
                              .stride = is_placed ? placed->second[1] - placed->second[0] : 1};
    plan->phases = machine_.phases_of(exchange);
    plan->lateness = Arrivals::lateness_of_last(machine_.task_jitter(), ranks);
    if (is_placed) simulation_.place(device, plan->turn, placed->second);
    task.touched.each_written(
        [&](const MemoryRange& range) { cache_of(device).forget(range.begin, range.end); });
  } else if (dynamic_cast<const Transfers*>(&task) != nullptr) {
    plan->kind = Kind::kCommunication;
    plan->phases = machine_.phases_of(Collective{
        .exchange = Exchange::kBroadcast, .bytes = static_cast<int64_t>(plan->bytes), .ranks = 2});
  } else if (name == "memory copy") {
    plan->kind = Kind::kCopy;
    bool from = false;
    bool to = false;
    int64_t bytes = 0;
    for (const Access& access : task.touched.accesses()) {
      (access.write ? to : from) = is_in_memory_of_devices(access);
      bytes = static_cast<int64_t>(access.end - access.begin);
    }
    const auto direction = from && to ? Machine::Direction::kWithin
                           : from     ? Machine::Direction::kOut
                                      : Machine::Direction::kIn;
    plan->phases = machine_.phases_of_copy(direction, bytes);
  } else if (name == "memory fill") {
    plan->phases = machine_.phases_of(
        Work{.products = {}, .written_bytes = static_cast<int64_t>(traffic.written)});
  } else if (task.work != nullptr) {
    const bool is_nothing = task.work->kind == Work::Class::kNothing;
    plan->phases =
        machine_.phases_of(*task.work, is_nothing ? 0 : use_cache(task, device), task.cores);
    plan->bytes = static_cast<uint64_t>(task.work->read_bytes + task.work->written_bytes);
  } else if (name.starts_with("aclnn")) {
    throw Failure(FailureKind::kNotSupported,
                  std::string(name) +
                      " has no cost, so that the timing model cannot tell how long it takes. State "
                      "one in its row (`.cost`; `vnpu coverage` lists what lacks one), or run "
                      "without --chip.");
  } else {
    plan->kind = Kind::kEvent;  // host functions, waits for values in memory
  }
  return plan;
}

Time Model::cost_of_launch(const Task& task) const {
  const Machine::HostCosts& costs = machine_.host();
  const std::string_view name = task.name;
  if (name == "graph replay") return costs.graph_launch;
  if (name == "memory copy" || name == "memory fill") return costs.copy_launch;
  if (name.starts_with("aclnn")) return costs.operator_launch;
  if (dynamic_cast<const vnpu::Collective*>(&task) != nullptr ||
      dynamic_cast<const Transfers*>(&task) != nullptr) {
    return costs.collective_launch;
  }
  if (const auto* update = dynamic_cast<const GraphUpdate*>(&task)) {
    return costs.operator_launch * static_cast<Time>(update->size());
  }
  return costs.event_call;
}

void Model::make_room(int stream) {
  const auto depth = static_cast<size_t>(machine_.queue_depth());
  if (simulation_.queued(stream) < depth) return;
  simulation_.advance(host_);
  if (simulation_.queued(stream) < depth) return;
  host_ = std::max(host_, simulation_.make_room(stream, depth));
}

void Model::on_launch(const Stream& stream, const Task& task, const std::string&) {
  const bool is_event = dynamic_cast<const EventRecord*>(&task) != nullptr ||
                        dynamic_cast<const EventWait*>(&task) != nullptr;
  if (is_event) return;  // on_record and on_wait have told
  if (stream.capture != nullptr) {
    captured_[stream.capture->id].push_back(
        {Captured::What::kLaunch, stream.id, stream.capture->size()});
    return;
  }
  join_pace();
  host_ += cost_of_launch(task);
  make_room(stream.id);
  if (const auto* graph = dynamic_cast<const GraphReplay*>(&task)) {
    replay(stream, graph->graph());
    return;
  }
  launch(stream.device, stream.id, plan_of(task, stream.device));
}

void Model::on_record(const Stream& stream, const Event& event) {
  if (stream.capture != nullptr) {
    captured_[stream.capture->id].push_back({Captured::What::kRecord, stream.id, event.id});
    return;
  }
  host_ += machine_.host().event_call;
  make_room(stream.id);
  const uint64_t record = simulation_.record(stream.device, stream.id, record_plan_, host_);
  records_[event.id] = record;
  events_[record] = event.id;
  times_.erase(event.id);
}

void Model::on_wait(const Stream& stream, const Event& event, const std::string&) {
  if (stream.capture != nullptr) {
    captured_[stream.capture->id].push_back({Captured::What::kWait, stream.id, event.id});
    return;
  }
  host_ += machine_.host().event_call;
  const auto found = records_.find(event.id);
  if (found == records_.end()) return;  // never recorded: complete
  make_room(stream.id);
  simulation_.wait(stream.device, stream.id, found->second, wait_plan_, host_);
}

int Model::side_stream(const Stream& launching, int captured) {
  const auto next = kFirstSideStream + static_cast<int>(side_streams_.size());
  const auto [place, is_new] = side_streams_.try_emplace({launching.id, captured}, next);
  if (is_new && timeline_ != nullptr) {
    timeline_->name_stream(launching.device, place->second,
                           "graph's side stream " + std::to_string(captured));
  }
  return place->second;
}

void Model::replay(const Stream& stream, const Graph& graph) {
  std::unordered_map<uint64_t, uint64_t> inside;  // event -> its newest record
  for (const Captured& each : captured_[graph.id]) {
    const int row =
        each.stream == graph.origin_stream ? stream.id : side_stream(stream, each.stream);
    switch (each.what) {
      case Captured::What::kRecord:
        inside[each.number] = simulation_.record(stream.device, row, record_plan_, host_);
        break;
      case Captured::What::kWait:
        if (const auto found = inside.find(each.number); found != inside.end()) {
          simulation_.wait(stream.device, row, found->second, wait_plan_, host_);
        }
        break;
      case Captured::What::kLaunch: {
        const TaskPtr task = graph.node(each.number);
        if (task == nullptr) break;
        auto plan = std::make_shared<Plan>(*plan_of(*task, stream.device));
        if (!plan->phases.empty()) plan->phases.front().fixed += machine_.graph_node();
        launch(stream.device, row, std::move(plan));
        break;
      }
      case Captured::What::kPrefetch:
        launch_prefetch(stream.device, row, each.number, each.bytes);
        break;
    }
  }
}

void Model::join_pace() {
  if (!std::exchange(has_waited_, false) || paced_ == nullptr) return;
  simulation_.advance(host_);
  if (simulation_.is_idle()) host_ = std::max(host_, paced_->now());
}

void Model::on_wait_over() {
  if (paced_ != nullptr && waited_until > 0) paced_->sleep_until(waited_until);
}

void Model::wait_until(Time time) {
  waited_ += std::max<Time>(0, time - host_);
  host_ = std::max(host_, time) + machine_.host().synchronize;
  waited_until = has_waited_ ? 0 : host_;  // nothing was launched since the wait before
  has_waited_ = true;
}

void Model::on_stream_waited(const Stream& stream) {
  wait_until(simulation_.finish_stream(stream.id));
}

void Model::on_device_waited(const int& device) { wait_until(simulation_.finish_device(device)); }

void Model::on_event_waited(const Event& event) {
  const auto found = records_.find(event.id);
  if (found != records_.end()) simulation_.finish_record(found->second);
  wait_until(found == records_.end() ? host_ : times_.at(event.id));
}

std::optional<Time> Model::time_of(const Event& event) const {
  const auto found = times_.find(event.id);
  return found == times_.end() ? std::nullopt : std::optional(found->second);
}

Model::Report Model::report(int device) {
  simulation_.advance(host_);
  host_ = std::max(host_, simulation_.finish_device(device));
  return {host_, simulation_.usage(device)};
}

void Model::pass_host_step(int64_t requests, bool beside_device) {
  const Time all = machine_.host().step + requests * machine_.host().step_request;
  host_ += beside_device ? std::max<Time>(0, all - waited_) : all;
  waited_ = 0;
}

void Model::set_routed_share(int64_t numerator, int64_t denominator) {
  routed_numerator_ = numerator;
  routed_denominator_ = denominator;
}

int64_t Model::routed_rows(int64_t rows) const {
  return (rows * routed_numerator_ + routed_denominator_ - 1) / routed_denominator_;
}

void Model::name_stream(const Stream& stream, const std::string& name) {
  if (timeline_ != nullptr) timeline_->name_stream(stream.device, stream.id, name);
}

void Model::label_launches(const std::string& label) {
  if (timeline_ != nullptr) label_ = timeline_->label(label);
}

void Model::restart_timeline(int device) {
  report(device);
  if (timeline_ != nullptr) timeline_->clear();
}

void Model::write_timeline() {
  if (timeline_ == nullptr) return;
  timeline_->write();
}

}  // namespace vnpu::timing
