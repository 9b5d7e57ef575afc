#include "device/observer.h"

#include <memory>

#include "device/task.h"

namespace vnpu {

Observers& Observers::instance() {
  static Observers* const observers = [] {
    auto made = std::make_unique<Observers>();
    add_observers(*made);
    return made.release();
  }();
  return *observers;
}

void Observers::add(Observer& observer) {
  const size_t count = count_.load();
  all_.at(count) = &observer;
  count_.store(count + 1, std::memory_order_release);
  const Observer::Needs needs = observer.needs();
  needs_.accesses |= needs.accesses;
  needs_.call_sites |= needs.call_sites;
  needs_.deadlocks |= needs.deadlocks;
  needs_.work |= needs.work;
  Touched::keeps_accesses |= needs.accesses;
  Task::keeps_work |= needs.work;
}

}  // namespace vnpu
