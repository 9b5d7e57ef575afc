#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "timing/arrival.h"
#include "timing/fluid.h"
#include "timing/hardware_queues.h"
#include "timing/resources.h"

namespace vnpu::timing {

enum class Kind : uint8_t { kCompute, kCommunication, kCopy, kEvent };

// A task as the model sees it. Shared by all its launches.
struct Plan {
  const char* name = "";  // a literal
  Kind kind = Kind::kCompute;
  std::vector<Phase> phases;
  uint64_t bytes = 0;          // of device memory, read and written
  const void* turn = nullptr;  // tasks of one turn run in the order of launch: a communicator's
  Time lateness = 0;           // of the last rank, one task after the ranks met
  Time alone() const;
};
using PlanPtr = std::shared_ptr<const Plan>;

// A task that has ended.
struct Span {
  PlanPtr plan;
  int device = 0;
  int stream = 0;
  Time launched = 0;
  Time begin = 0;
  Time end = 0;
  Time waited = 0;      // part of it: waits for the last rank
  uint32_t label = 0;   // the caller's
  uint64_t record = 0;  // number of the record that is made or awaited
  bool waits = false;   // waits for the record instead of making it
};

// Sums of a device's activity: times with work of a kind in progress; `both`: of compute and of
// communication.
struct Usage {
  Time compute = 0;
  Time communication = 0;
  Time both = 0;
  Time any = 0;
  Busy busy = {};  // of the work that has ended
  // Sums over tasks of what each takes alone.
  Time compute_alone = 0;
  Time communication_alone = 0;
};

// Streams, events and tasks on the modelled clock, simulated event by event in integers, so that
// the result depends on the inputs only. A task begins when it heads its stream, has been launched,
// its turn has come, and its stream has a hardware queue; if several could begin and there are
// fewer queues, streams of lower numbers come first. The simulation runs only as far as requested,
// which does not change results: later launches just must not lie before now().
class Simulation {
 public:
  using OnEnd = std::function<void(const Span&)>;
  // Share of each resource that a device uses from now on, in 1 / kWhole.
  using OnUse = std::function<void(int device, Time now, const Shares& use)>;
  explicit Simulation(OnEnd on_end = nullptr, OnUse on_use = nullptr, HardwareQueues queues = {})
      : on_end_(std::move(on_end)), on_use_(std::move(on_use)), queues_(std::move(queues)) {}

  void launch(int device, int stream, PlanPtr plan, Time launched, uint32_t label = 0);
  // Records a point of a stream; returns its number. `plan`: cost of recording; may be null.
  uint64_t record(int device, int stream, PlanPtr plan, Time launched);
  // The ranks of the communicator with this turn, ascending. Without this call, it is not known
  // which other groups its ranks meet.
  void place(int device, const void* turn, const std::vector<int64_t>& ranks) {
    arrivals_.place(device, turn, ranks);
  }
  // The number that the next record will have.
  uint64_t next_record() const { return forgotten_ + reached_.size() + 1; }
  // Later tasks on the stream wait for the record. `plan`: cost of the wait; may be null.
  void wait(int device, int stream, uint64_t record, PlanPtr plan, Time launched);

  Time now() const { return now_; }
  // Simulates up to a time.
  void advance(Time until);
  // Simulates until the stream (device, all) has nothing to do, or the record is reached. Returns
  // the time when it was, which may be before now(). Throws Failure(kInternal) if it can never be.
  Time finish_stream(int stream);
  Time finish_record(uint64_t record);
  Time finish_device(int device);
  // Until fewer than `depth` tasks are queued on the stream.
  Time make_room(int stream, size_t depth);
  size_t queued(int stream) const;
  bool is_idle() const;
  // Time at which it was reached; -1: not yet, or forgotten.
  Time time_of(uint64_t record) const;

  const Usage& usage(int device) { return usages_[device]; }

 private:
  struct Item {
    PlanPtr plan;
    Time launched;
    uint32_t label;
    uint64_t record = 0;  // that it makes or waits for
    bool waits = false;
    uint64_t ticket = 0;  // of its turn
  };
  struct Turn {
    uint64_t tickets = 0;  // given
    uint64_t over = 0;
  };
  struct Stream {
    int device = 0;
    int id = 0;
    std::deque<Item> items;
    bool running = false;  // the head
    Time begun = 0;
    Time waited = 0;  // for the last rank
    Way way;
    size_t phase = 0;
    Time fixed_left = 0;
    unsigned __int128 work_left = 0;  // in 1 / kWhole of a picosecond at full speed
    Shares shares = {};
    uint64_t speed = 0;
    Time ended = 0;  // when the newest task ended
  };

  static constexpr Time kNever = std::numeric_limits<Time>::max();

  Stream& stream_of(int device, int id);
  void push(int device, int stream, Item item);
  // Begins and ends all that can begin and end now.
  void settle();
  bool try_begin(Stream& stream);
  static bool is_phase_over(const Stream& stream);
  void enter_phase(Stream& stream);
  void await_ranks(Stream& stream, const Item& head, Time from);
  void end_head(Stream& stream);
  void find_speeds();
  void tell_use(int device, const std::vector<Stream*>& working);
  // The next time at which something changes; kNever if nothing will.
  Time next_change() const;
  void move_to(Time time);
  bool step(Time until);
  template <class Done>
  void run_until(Done done, const char* what);
  bool reached(uint64_t record) const;
  std::string stuck() const;

  OnEnd on_end_;
  OnUse on_use_;
  std::map<int, Shares> uses_;  // last values given to on_use_, by device
  Time now_ = 0;
  std::map<int, Stream> streams_;
  std::vector<Stream*> running_;
  bool speeds_known_ = false;
  std::unordered_map<const void*, Turn> turns_;
  Arrivals arrivals_;
  HardwareQueues queues_;
  std::unordered_map<int, Usage> usages_;
  struct Reached {
    Time time = -1;  // not yet
    Way way;
  };
  std::deque<Reached> reached_;  // by record - forgotten_ - 1
  uint64_t forgotten_ = 0;       // records up to this one are reached
};

}  // namespace vnpu::timing
