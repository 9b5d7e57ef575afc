#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/configuration.h"
#include "device/observer.h"
#include "device/schedule/schedule.h"
#include "device/stream.h"
#include "device/task_queues.h"

namespace vnpu {

// A program's requests to its streams: work, events, graphs, waits. The schedule decides when and
// where a task runs.
class Executor {
 public:
  // observers: complete, and as long-lived as this
  Executor(const Configuration& configuration, const Observers& observers);
  ~Executor() = delete;  // lives as long as the process

  StreamPtr create_stream(int device, uint32_t priority);
  void destroy_stream(const StreamPtr& stream);

  // Takes a task for a stream. If it ran at once and failed, throws its Failure; a later failure is
  // kept and thrown by the next synchronisation.
  void submit(const StreamPtr& stream, TaskPtr task);

  // Marks / waits for a point of a stream. During capture they carry the capture from one stream to
  // another instead of becoming tasks.
  void record(const StreamPtr& stream, const EventPtr& event);
  void wait(const StreamPtr& stream, const EventPtr& event);

  // Graph capture. Work of a capturing stream is kept instead of run.
  GraphPtr begin_capture(const StreamPtr& stream, CaptureMode mode = CaptureMode::kGlobal);
  GraphPtr capture_of(const StreamPtr& stream);
  GraphPtr end_capture(const StreamPtr& stream);
  void begin_group(const StreamPtr& stream);
  std::shared_ptr<Graph::TaskGroup> end_group(const StreamPtr& stream);
  void begin_update(const StreamPtr& stream, std::shared_ptr<Graph::TaskGroup> group);
  void end_update(const StreamPtr& stream);

  // Refuses a synchronous call during a capture whose mode forbids it. `mode`: the calling
  // thread's; `what`: the call, a noun.
  void check_synchronous(CaptureMode mode, const char* what);

  // Host waits. All throw Failure(kWaitTimeout) at `limit` or at VNPU_WAIT_LIMIT, naming what was
  // waited for, and throw (once) what failed on the streams concerned.
  using Limit = std::optional<std::chrono::milliseconds>;
  void synchronize(const StreamPtr& stream, Limit limit);
  void synchronize(const EventPtr& event, Limit limit);
  void synchronize_device(int device, Limit limit);
  // The current ends of a device's queues. Work before them has passed when it is done, failed or
  // dropped.
  using Tails = std::vector<std::pair<StreamPtr, uint64_t>>;  // tasks that each stream has taken
  Tails tails(int device);
  bool have_passed(const Tails& tails);
  // Runs the queued tasks of the device; errors stay with their streams. Observers are not told, as
  // the program does not wait. False if no task has ended or run for `patience` (or
  // VNPU_WAIT_LIMIT); sooner, if that has been so since the last call.
  bool drain_device(int device, Limit patience);
  // Calls `action` while no task of any device runs; queued tasks continue afterwards. It may not
  // call the executor.
  void while_nothing_runs(const std::function<void()>& action);
  // Aborts the unfinished work of a stream, or of each stream of a device: it fails with this
  // failure, as does everything that waits for it. Returns the aborted work; throws kWaitTimeout if
  // a task keeps running for `limit`.
  std::vector<TaskPtr> abort(const StreamPtr& stream, const Failure& failure, Limit limit);
  std::vector<TaskPtr> abort_device(int device, const Failure& failure, Limit limit);
  // "stream 3 of device 0: 2 tasks, the first (all_reduce) waits for rank 1 ..."
  std::string pending() const;
  // Gives pending work a chance and tells whether the stream is idle / the event complete.
  bool query(const StreamPtr& stream);
  bool query(const EventPtr& event);

  // A host thread that waits for a stream, an event or all of a device.
  struct HostWait {
    std::string call_site;
    const Stream* stream = nullptr;
    const Event* event = nullptr;
    uint64_t version = 0;  // of the event
    int device = -1;
    std::thread::id thread = std::this_thread::get_id();
  };
  // The tasks and host threads that cannot proceed before `head`, a stream's first task, has ended:
  // tasks behind it on its stream and, through events, on other streams; host threads that wait for
  // one of these. Host threads are known only if an observer asks for deadlocks.
  struct Held {
    std::vector<TaskPtr> tasks;
    std::vector<HostWait> hosts;
  };
  Held held_by(const Task& head);

  // Notifies observers of an event that no call above causes; see Observers::tell.
  template <class... P, class... A>
  void tell(void (Observer::*event)(P...), const A&... arguments) {
    const Lock lock(queues_.mutex);
    observers_.tell(event, arguments...);
  }

  // Calls a function that looks at an observer, which no call reaches meanwhile.
  template <class Look>
  void look(Look look) {
    const Lock lock(queues_.mutex);
    look();
  }

  std::mutex& mutex() { return queues_.mutex; }  // guards Stream members, orders what observers see

 private:
  class AnnouncedWait;
  using Lock = TaskQueues::Lock;

  void wait_until(const std::function<bool()>& done, Limit limit, const char* what, Lock& lock);
  void enqueue(const StreamPtr& stream, TaskPtr task);
  std::vector<TaskPtr> abort_all(const std::vector<StreamPtr>& streams, const Failure& failure,
                                 Limit limit, Lock& lock);
  void throw_failure(Stream& stream);
  bool device_idle(int device) const;
  // Notifies observers that the host has waited for all streams of the device.
  void host_has_seen(int device, const std::string& call_site);
  std::string describe_pending() const;
  bool have_passed_locked(const Tails& tails) const;
  // Keeps a launch if its stream captures or updates a task group; returns false otherwise.
  bool keep(const StreamPtr& stream, TaskPtr& task, const std::string& call_site);
  // Waits until the device has a free event, as a chip's runtime does.
  EventHoldPtr hold_event(int device, Lock& lock);
  // Refuses a wait of the host for an event whose newest record was captured and not run.
  static void check_not_captured(const Event& event, const char* what);

  const Observers& observers_;
  const std::chrono::milliseconds wait_limit_;
  mutable TaskQueues queues_;
  const std::unique_ptr<Schedule> schedule_;
  std::vector<const HostWait*> host_waits_;
  std::vector<GraphPtr> captures_;    // that are under way
  std::atomic<size_t> capturing_{0};  // their number
  int next_stream_id_ = 0;
  // By device: queues for which a drain gave up, and the tasks that had ended in each.
  std::map<int, Tails> stuck_;
};

}  // namespace vnpu
