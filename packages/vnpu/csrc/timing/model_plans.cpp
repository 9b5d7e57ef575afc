// The model's view of a task: the phases of its plan, the share of its reads that is in L2, and the
// host's time for its launch.

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "collective/collective.h"
#include "collective/transfers.h"
#include "device/failure.h"
#include "device/graph.h"
#include "device/memory.h"
#include "device/traffic.h"
#include "timing/model.h"

namespace vnpu::timing {
namespace {

using Wide = unsigned __int128;

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
  // A cost may state that only a part is read or written: some experts, some rows of a cache.
  const Wide read = std::min(all_read, static_cast<Wide>(task.work->read_bytes));
  const Wide written = std::min(all_written, static_cast<Wide>(task.work->written_bytes));
  // Touched bytes of a range that stay in L2 count as its first bytes. A task that later touches a
  // part of the same range finds those. Of bytes brought in otherwise, such as weights prefetched
  // before their experts were chosen, it finds a proportional part.
  const auto touched = [&](const Access& access) {
    const auto range = static_cast<Wide>(access.end - access.begin);
    const Wide all = access.write ? all_written : all_read;
    return static_cast<uintptr_t>(all == 0 ? 0 : range * (access.write ? written : read) / all);
  };
  Wide there = 0;
  const auto count = [&](const Access& access, const Cache::Found& found) {
    // A strided tensor is in L2 in the same proportion as the range around it.
    const auto range = static_cast<Wide>(access.end - access.begin);
    const auto part = static_cast<Wide>(touched(access));
    Wide bytes = static_cast<Wide>(found.bytes - found.touched);
    if (part > 0) bytes += static_cast<Wide>(found.touched) * range / part;
    there += static_cast<Wide>(bytes_of(access)) * std::min(bytes, range) / range;
    awaited_.insert(awaited_.end(), found.arrivals.begin(), found.arrivals.end());
  };
  // Computed before any is used, because two of them may interleave in one range.
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

PlanPtr Model::plan_of(const Task& task, int device) {
  auto plan = std::make_shared<Plan>();
  plan->name = task.name;
  const Traffic traffic = traffic_of(task);
  plan->bytes = traffic.read + traffic.written;
  const std::string_view name = task.name;
  if (const auto* collective = dynamic_cast<const vnpu::Collective*>(&task)) {
    plan->kind = Kind::kCommunication;
    plan->turn = collective->member().get();
    // Expert exchanges are operators, whose cost has the bytes sent.
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

}  // namespace vnpu::timing
