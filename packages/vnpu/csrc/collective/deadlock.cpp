#include "collective/deadlock.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "collective/group_registry.h"
#include "device/system.h"

namespace vnpu {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{1000};  // ranks in good order are late by less than this
constexpr milliseconds kInterval{200};   // between two looks

struct Held {
  GroupPtr group;
  std::string what;
};

std::string launched(const std::string& what, const Group& group, const std::string& call_site) {
  return what + " of group " + group.name() + ", launched at" +
         (call_site.empty() ? "\n      (no Python frame)" : call_site);
}

// The next collective of each other group that cannot begin before `waiting` ends: it is queued
// behind `waiting`, or the host thread that would launch it waits for `waiting`.
std::vector<Held> held_by(const GroupTask& waiting) {
  const auto [tasks, hosts] = System::instance().executor().held_by(waiting);
  std::vector<Held> held;
  const auto add = [&](const GroupPtr& group, const std::string& what) {
    const auto known = [&](const Held& each) { return each.group == group; };
    if (group == waiting.member() || std::any_of(held.begin(), held.end(), known)) return;
    held.push_back({group, what});
  };
  for (const TaskPtr& task : tasks) {
    if (const auto* next = dynamic_cast<const GroupTask*>(task.get())) {
      add(next->member(), "holds up " + launched(next->name, *next->member(), next->call_site()));
    }
  }
  for (const Executor::HostWait& host : hosts) {
    for (const GroupPtr& group : groups_of(waiting.member()->device())) {
      if (group->maker.load() != host.thread || group->made.load() != group->collectives.load()) {
        continue;  // another thread may go on, or a launched one may begin
      }
      add(group, "keeps the host from its next launch in group " + group->name() + ": it waits at" +
                     host.call_site);
    }
  }
  return held;
}

void tell(Obstacle& obstacle, const GroupTask& waiting, const std::string& what) {
  if (obstacle.state.load(std::memory_order_relaxed) == 2 &&
      obstacle.sequence == waiting.sequence() && waiting.member()->identity() == obstacle.group) {
    return;
  }
  obstacle.state.store(1, std::memory_order_release);
  obstacle.sequence = waiting.sequence();
  std::snprintf(obstacle.group, sizeof(obstacle.group), "%s", waiting.member()->identity().c_str());
  std::snprintf(obstacle.waiting, sizeof(obstacle.waiting), "%s",
                launched(waiting.title(), *waiting.member(), waiting.call_site()).c_str());
  std::snprintf(obstacle.held, sizeof(obstacle.held), "%s", what.c_str());
  obstacle.state.store(2, std::memory_order_release);
}

}  // namespace

void DeadlockWatch::look(const GroupTask& waiting, std::chrono::steady_clock::time_point begin) {
  const auto now = std::chrono::steady_clock::now();
  if (now - begin < kPatience || now - looked_ < kInterval) return;
  looked_ = now;
  const std::vector<Held> held = held_by(waiting);
  for (const Held& each : held) {
    tell(each.group->segment().rank(each.group->rank()).obstacle, waiting, each.what);
    if (std::find(told_.begin(), told_.end(), each.group) == told_.end()) {
      told_.push_back(each.group);
    }
  }
  Group& group = *waiting.member();
  for (uint32_t r = 0; r < group.ranks(); ++r) {
    if (!waiting.waits_for(r)) continue;
    const Obstacle& theirs = group.segment().rank(r).obstacle;
    if (theirs.state.load(std::memory_order_acquire) != 2) continue;
    for (const Held& each : held) {
      // They wait for a collective that this rank has not begun and cannot begin.
      if (each.group->identity() != theirs.group ||
          each.group->collectives.load() >= theirs.sequence) {
        continue;
      }
      const std::string text =
          "vnpu: deadlock of two groups.\n  " + group.describe(group.rank()) + " waits for " +
          group.describe(r) + " in " + launched(waiting.title(), group, waiting.call_site()) +
          "\n    which " + each.what + "\n  " + group.describe(r) + " waits for " +
          group.describe(group.rank()) + " in " + theirs.waiting + "\n    which " + theirs.held +
          "\n  Let all ranks launch the collectives of both groups in the same order, or on "
          "streams "
          "that do not wait for each other.";
      System::instance().executor().tell(&Observer::on_deadlock, text);
      each.group->set_failure(FailureKind::kRemoteTimeout, text);
      group.fail(FailureKind::kRemoteTimeout, text);
    }
  }
}

void DeadlockWatch::end() {
  for (const GroupPtr& group : told_) {
    group->segment().rank(group->rank()).obstacle.state.store(0, std::memory_order_release);
  }
  told_.clear();
}

}  // namespace vnpu
