// Aborts work that is no longer needed.

#include <algorithm>
#include <utility>

#include "device/executor.h"

namespace vnpu {

std::vector<TaskPtr> Executor::abort(const StreamPtr& stream, const Failure& failure, Limit limit) {
  Lock lock(queues_.mutex);
  return abort_all({stream}, failure, limit, lock);
}

std::vector<TaskPtr> Executor::abort_device(int device, const Failure& failure, Limit limit) {
  Lock lock(queues_.mutex);
  std::vector<StreamPtr> streams;
  for (const StreamPtr& stream : queues_.streams()) {
    if (stream->device == device) streams.push_back(stream);
  }
  return abort_all(streams, failure, limit, lock);
}

std::vector<TaskPtr> Executor::abort_all(const std::vector<StreamPtr>& streams,
                                         const Failure& failure, Limit limit, Lock& lock) {
  std::vector<std::shared_ptr<Abort>> aborts;
  for (const StreamPtr& stream : streams) {
    if (!stream->idle()) aborts.push_back(queues_.abort(*stream, failure));
  }
  const auto are_settled = [&] {
    return std::ranges::all_of(streams, [](const auto& each) { return each->abort == nullptr; });
  };
  wait_until(are_settled, limit, "the tasks under way, which are to be given up", lock);
  schedule_->poll(lock);  // the records of events that were kept
  std::vector<TaskPtr> dropped;
  for (const std::shared_ptr<Abort>& abort : aborts) {
    std::ranges::move(abort->dropped, std::back_inserter(dropped));
  }
  return dropped;
}

}  // namespace vnpu
