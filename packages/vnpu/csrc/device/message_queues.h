#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace vnpu {

// Bounded queues of messages between threads of this process, each of one device, and routes that
// pass what comes into one on to others.
class MessageQueues {
 public:
  using Id = uint32_t;
  struct Message {
    std::vector<std::string> parts;
  };
  struct Route {
    Id from;
    Id to;
    bool operator==(const Route&) const = default;
  };
  static constexpr uint32_t kLeastDepth = 2;
  static constexpr uint32_t kMostDepth = 8192;

  static MessageQueues& instance();

  // Throws kInvalidArgument for a depth outside of [kLeastDepth, kMostDepth], and where the device
  // has a queue of that name; name: empty for none.
  Id create(int device, const std::string& name, uint32_t depth);
  // Throws kInvalidArgument while a route begins or ends there. This and all below throw
  // kInvalidHandle for what is no queue.
  void destroy(Id id);
  void clear(Id id);
  size_t size(Id id);
  // Those who wait for the queue wait no longer.
  void stop(Id id);

  // Wait for room, or for a message, at most `limit`, by default VNPU_WAIT_LIMIT, at which they
  // throw kWaitTimeout. False where none came, or the queue was stopped.
  using Limit = std::optional<std::chrono::milliseconds>;
  bool push(Id id, Message message, Limit limit);
  // take: is given the first message, which stays where it throws
  bool pop(Id id, const std::function<void(const Message&)>& take, Limit limit);

  // A message goes on to the ends of all routes that begin at its queue, once each has room.
  // Throws kInvalidArgument for a route that is there, or that would close a circle.
  void bind(const Route& route);
  // Throws kInvalidArgument for a route that is not there.
  void unbind(const Route& route);
  std::vector<Route> routes() const;

 private:
  struct Queue {
    int device;
    std::string name;
    uint32_t depth;
    uint64_t stops = 0;
    std::deque<std::shared_ptr<const Message>> messages = {};
  };
  using Lock = std::unique_lock<std::mutex>;

  Queue& find(Id id);
  // Waits until `ready` says so of the queue. See push.
  bool await(Id id, const std::function<bool(const Queue&)>& ready, Limit limit, Lock& lock);
  // Whether messages of `from` reach `to`.
  bool leads(Id from, Id to) const;
  // Passes on what can be.
  void pass_on();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Id, Queue> queues_;
  std::vector<Route> routes_;
  Id next_ = 0;
};

}  // namespace vnpu
