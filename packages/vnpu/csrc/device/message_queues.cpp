#include "device/message_queues.h"

#include <algorithm>

#include "device/configuration.h"
#include "device/failure.h"

namespace vnpu {
namespace {

using std::chrono::milliseconds;

std::string text_of(const MessageQueues::Route& route) {
  return "from queue " + std::to_string(route.from) + " to " + std::to_string(route.to);
}

}  // namespace

MessageQueues& MessageQueues::instance() {
  static auto* const queues = new MessageQueues();  // threads may wait past the end of main
  return *queues;
}

MessageQueues::Id MessageQueues::create(int device, const std::string& name, uint32_t depth) {
  if (depth < kLeastDepth || depth > kMostDepth) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a queue of " + std::to_string(depth) + " messages; they hold " +
                      std::to_string(kLeastDepth) + " to " + std::to_string(kMostDepth) + ".");
  }
  const Lock lock(mutex_);
  for (const auto& [id, queue] : queues_) {
    if (!name.empty() && queue.device == device && queue.name == name) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: device " + std::to_string(device) + " has a queue \"" + name +
                        "\" already. Destroy that one, or choose another name.");
    }
  }
  queues_.emplace(next_, Queue{device, name, depth});
  return next_++;
}

void MessageQueues::destroy(Id id) {
  const Lock lock(mutex_);
  find(id);
  for (const Route& route : routes_) {
    if (route.from == id || route.to == id) {
      throw Failure(FailureKind::kInvalidArgument, "vnpu: queue " + std::to_string(id) +
                                                       " is destroyed while a route leads " +
                                                       text_of(route) + ". Unbind it first.");
    }
  }
  queues_.erase(id);
  changed_.notify_all();
}

void MessageQueues::clear(Id id) {
  const Lock lock(mutex_);
  find(id).messages.clear();
  pass_on();
}

size_t MessageQueues::size(Id id) {
  const Lock lock(mutex_);
  return find(id).messages.size();
}

void MessageQueues::stop(Id id) {
  const Lock lock(mutex_);
  ++find(id).stops;
  changed_.notify_all();
}

bool MessageQueues::push(Id id, Message message, Limit limit) {
  Lock lock(mutex_);
  const auto has_room = [](const Queue& queue) { return queue.messages.size() < queue.depth; };
  if (!await(id, has_room, limit, lock)) return false;
  find(id).messages.push_back(std::make_shared<const Message>(std::move(message)));
  pass_on();
  return true;
}

bool MessageQueues::pop(Id id, const std::function<void(const Message&)>& take, Limit limit) {
  Lock lock(mutex_);
  if (!await(id, [](const Queue& queue) { return !queue.messages.empty(); }, limit, lock)) {
    return false;
  }
  Queue& queue = find(id);
  take(*queue.messages.front());
  queue.messages.pop_front();
  pass_on();
  return true;
}

void MessageQueues::bind(const Route& route) {
  const Lock lock(mutex_);
  find(route.from);
  find(route.to);
  if (std::ranges::count(routes_, route) != 0) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a route " + text_of(route) + " is bound already.");
  }
  if (leads(route.to, route.from)) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a route " + text_of(route) + " would close a circle of routes.");
  }
  routes_.push_back(route);
  pass_on();
}

void MessageQueues::unbind(const Route& route) {
  const Lock lock(mutex_);
  if (std::erase(routes_, route) == 0) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: no route " + text_of(route) + " is bound.");
  }
}

std::vector<MessageQueues::Route> MessageQueues::routes() const {
  const Lock lock(mutex_);
  return routes_;
}

MessageQueues::Queue& MessageQueues::find(Id id) {
  const auto found = queues_.find(id);
  if (found == queues_.end()) {
    throw Failure(FailureKind::kInvalidHandle, "vnpu: queue " + std::to_string(id) +
                                                   " is not a live one (destroyed before its last "
                                                   "use?).");
  }
  return found->second;
}

bool MessageQueues::await(Id id, const std::function<bool(const Queue&)>& ready, Limit limit,
                          Lock& lock) {
  const uint64_t stops = find(id).stops;
  const auto is_over = [&] {
    const Queue& queue = find(id);
    return queue.stops != stops || ready(queue);
  };
  const double most = Configuration::instance().wait_limit_seconds;
  const milliseconds wait_limit{static_cast<int64_t>(most * 1000)};
  const milliseconds longest = limit.has_value() ? std::min(*limit, wait_limit) : wait_limit;
  if (!changed_.wait_for(lock, longest, is_over)) {
    if (limit.has_value() && *limit <= wait_limit) return false;
    throw Failure(FailureKind::kWaitTimeout, "vnpu: waited " + std::to_string(longest.count()) +
                                                 " ms for queue " + std::to_string(id) +
                                                 ". A longer wait: VNPU_WAIT_LIMIT=SECONDS.");
  }
  return ready(find(id));
}

bool MessageQueues::leads(Id from, Id to) const {
  return from == to || std::ranges::any_of(routes_, [&](const Route& route) {
           return route.from == from && leads(route.to, to);
         });
}

void MessageQueues::pass_on() {
  for (bool again = true; again;) {
    again = false;
    for (auto& [id, queue] : queues_) {
      std::vector<Queue*> ends;
      for (const Route& route : routes_) {
        if (route.from == id) ends.push_back(&find(route.to));
      }
      const auto has_room = [](const Queue* end) { return end->messages.size() < end->depth; };
      if (ends.empty() || queue.messages.empty() || !std::ranges::all_of(ends, has_room)) continue;
      for (Queue* end : ends) end->messages.push_back(queue.messages.front());
      queue.messages.pop_front();
      again = true;
    }
  }
  changed_.notify_all();
}

}  // namespace vnpu
