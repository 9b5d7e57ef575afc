#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "device/configuration.h"
#include "device/stream.h"

namespace vnpu {

class Pace;
namespace trace {
class Recorder;
}

// Decides which stream's next task runs, where and when. Streams are in order; between streams
// any order that events allow is correct, and the policies differ only in which one they take:
//   eager    runs a task at once, on the launching thread, when nothing is before it; what cannot
//            run at once (another rank is late, say) is finished by a background thread
//   threads  one worker thread per stream
//   fuzz     runs tasks as late as the program allows, in an order drawn from a seed, so that a
//            missing wait shows as a wrong result
class Executor {
 public:
  explicit Executor(const Configuration& configuration);
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
  GraphPtr begin_capture(const StreamPtr& stream);
  GraphPtr capture_of(const StreamPtr& stream);
  GraphPtr end_capture(const StreamPtr& stream);
  void begin_group(const StreamPtr& stream);
  std::shared_ptr<Graph::TaskGroup> end_group(const StreamPtr& stream);
  void begin_update(const StreamPtr& stream, std::shared_ptr<Graph::TaskGroup> group);
  void end_update(const StreamPtr& stream);

  // Host waits. All throw Failure(kWaitTimeout) at `limit` or at VNPU_WAIT_LIMIT, naming what was
  // waited for, and throw (once) what failed on the streams concerned.
  using Limit = std::optional<std::chrono::milliseconds>;
  void synchronize(const StreamPtr& stream, Limit limit);
  void synchronize(const EventPtr& event, Limit limit);
  void synchronize_device(int device, Limit limit);
  // Waits until the device has nothing to do; errors stay with their streams.
  void drain_device(int device);
  // Gives pending work a chance and tells whether the stream is idle / the event complete.
  bool query(const StreamPtr& stream);
  bool query(const EventPtr& event);

  // A host thread that waits for a stream, an event or all of a device.
  struct HostWait {
    std::thread::id thread;
    std::string call_site;
    const Stream* stream = nullptr;
    const Event* event = nullptr;
    uint64_t version = 0;  // of the event
    int device = -1;
  };
  // What cannot come about before `head`, a stream's first task, has ended: tasks behind it on its
  // stream and, through events, on others; host threads that wait for one of them. Host threads are
  // known only where races are looked for.
  struct Held {
    std::vector<TaskPtr> tasks;
    std::vector<HostWait> hosts;
  };
  Held held_by(const Task& head);

  std::mutex& mutex() { return mutex_; }  // guards Stream members

 private:
  class AnnouncedWait;
  using Lock = std::unique_lock<std::mutex>;

  void submit_eager(const StreamPtr& stream, TaskPtr task, Lock& lock);
  // One call of a task, with the time it takes. Not under the lock.
  Progress advance(const Stream& stream, Task& task) const;
  void enqueue(const StreamPtr& stream, TaskPtr task, Lock& lock);
  // Runs the head of a stream until it is done or blocked. Unlocks while it runs.
  void run_head(Stream& stream, Lock& lock);
  // Runs what can run; returns whether anything got done.
  bool pump(Lock& lock);
  bool pump_fuzz(Lock& lock, size_t most);
  // Sleeps inside one head that waits for something outside; false if there is none that another
  // thread is not already in.
  bool wait_outside(Lock& lock);
  void wait_inside(Stream& stream, std::chrono::microseconds limit, Lock& lock);
  // Tells the threads that sleep until something changes.
  void announce_progress();
  void wait_for_progress(std::chrono::steady_clock::time_point until, Lock& lock);
  void wait_until(const std::function<bool()>& done, Limit limit, const char* what, Lock& lock);
  void throw_failure(Stream& stream);
  bool device_idle(int device) const;
  // Tells the race detector that the host has waited for all streams of the device.
  void host_has_seen(int device, const std::string& call_site);
  std::string describe_pending() const;
  void background();
  void stream_worker(StreamPtr stream);
  void start_background();

  trace::Recorder* const recorder_;  // null: nobody wants to know
  const Pace& pace_;
  const SchedulePolicy policy_;
  const std::chrono::milliseconds wait_limit_;
  std::mt19937_64 random_;  // of fuzz
  std::mutex mutex_;
  std::condition_variable changed_;  // a task finished
  size_t sleepers_ = 0;              // threads that wait for changed_
  std::condition_variable work_;     // for the background thread: take over
  std::vector<const HostWait*> host_waits_;
  size_t hosts_ = 0;         // host threads that drive the streams while they wait
  size_t next_outside_ = 0;  // where the search for a head to wait in begins
  std::vector<StreamPtr> streams_;
  size_t pending_ = 0;  // tasks in queues
  std::chrono::steady_clock::time_point last_host_call_;
  bool background_started_ = false;
  int next_stream_id_ = 0;
};

}  // namespace vnpu
