#include "timing/model.h"

#include <algorithm>
#include <utility>

#include "device/event.h"
#include "device/graph.h"
#include "device/stream.h"

namespace vnpu::timing {
namespace {

constexpr int kFirstSideStream = 1'000'000;

// Until when the wait that this thread is in lasts, on the modelled clock.
thread_local Time waited_until = 0;

}  // namespace

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
  const Time waited = std::max<Time>(0, time - host_);
  waited_ += waited;
  all_waited_ += waited;
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
  const Time end = simulation_.finish_device(device);
  all_waited_ += std::max<Time>(0, end - host_);
  host_ = std::max(host_, end);
  return {host_, all_waited_, simulation_.usage(device)};
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
