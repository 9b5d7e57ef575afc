#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/observer.h"
#include "timing/cache.h"
#include "timing/machine.h"
#include "timing/paced_clock.h"
#include "timing/simulation.h"
#include "timing/timeline_file.h"

namespace vnpu::timing {

// Follows the work of this process on its devices, and models when a chip would have done it
// [VNPU_TIMING: a machine's figures]. Nothing waits for the modelled time, and nothing depends on
// this host's clock: the host's modelled clock advances by a cost per call, and to the device's
// time in a wait for the device. All threads share one host clock. With pacing [VNPU_PACED: this
// host's seconds per modelled second] the host's waits take their modelled time.
class Model final : public Observer {
 public:
  // True if VNPU_TIMING is set.
  static bool is_wanted();
  // Null when VNPU_TIMING was not set at the first call.
  static Model* instance();

  // timeline: where spans go; may be null, as may be `paced`
  Model(Machine machine, std::unique_ptr<TimelineFile> timeline,
        std::unique_ptr<PacedClock> paced = nullptr);

  Needs needs() const override { return {.accesses = true, .work = true}; }
  void on_launch(const Stream& stream, const Task& task, const std::string& call_site) override;
  void on_record(const Stream& stream, const Event& event) override;
  void on_wait(const Stream& stream, const Event& event, const std::string& call_site) override;
  void on_stream_waited(const Stream& stream) override;
  void on_device_waited(const int& device) override;
  void on_event_waited(const Event& event) override;
  void on_wait_over() override;

  // When the newest record of the event was reached; nullopt if it has not been yet.
  std::optional<Time> time_of(const Event& event) const;

  struct Report {
    Time host = 0;    // the host's clock
    Time waited = 0;  // part of `host`: waits for the device
    Usage usage;      // the device's
  };
  // Waits, in modelled time, for all work of the device.
  Report report(int device);
  // The ranks of a communicator by the numbers that the topology counts; without this its ranks are
  // neighbours.
  void place_group(const std::string& name, const std::vector<int64_t>& ranks);
  // Begins to read memory into L2 after the work that the stream has been given so far.
  void prefetch(const Stream& stream, const void* address, size_t bytes);
  const PacedClock* paced() const { return paced_.get(); }
  // Advances the host's clock by the engine's own time for a step of `requests` requests; with
  // `beside_device`, as in asynchronous scheduling, only by what exceeds the host's waits since the
  // step before.
  void pass_host_step(int64_t requests, bool beside_device);
  // This rank's share of the rows that expert routing allocates.
  void set_routed_share(int64_t numerator, int64_t denominator);
  int64_t routed_rows(int64_t rows) const;

  void name_stream(const Stream& stream, const std::string& name);
  // Label of the program's launches from now on; "" for none.
  void label_launches(const std::string& label);
  bool writes_timeline() const { return timeline_ != nullptr; }
  void write_timeline();
  // Restarts the timeline here, after all earlier launches.
  void restart_timeline(int device);

 private:
  // One action of a stream during capture: a launch is node `number` of the graph, a prefetch
  // begins at address `number` and has `bytes`, the others are about event `number`.
  struct Captured {
    enum class What : uint8_t { kLaunch, kRecord, kWait, kPrefetch };
    What what;
    int stream;
    uint64_t number;
    size_t bytes = 0;
  };

  PlanPtr plan_of(const Task& task, int device);
  Cache& cache_of(int device);
  // Returns how many of the bytes that the task reads are in L2, and updates L2 with its reads and
  // writes. Bytes still being prefetched are present when the task begins: it has to wait for
  // awaited_.
  int64_t use_cache(const Task& task, int device);
  // The host's next call: not before this host's clock, where nothing is under way.
  void join_pace();
  void launch(int device, int stream, PlanPtr plan);
  void launch_prefetch(int device, int stream, uintptr_t begin, size_t bytes);
  PlanPtr event_plan(const char* name, Time fixed) const;
  Time cost_of_launch(const Task& task) const;
  void replay(const Stream& stream, const Graph& graph);
  // The row of a stream that a graph uses beside the one that replays it.
  int side_stream(const Stream& launching, int captured);
  void make_room(int stream);
  // The host's clock after a wait for work that ends at `time`.
  void wait_until(Time time);
  void on_end(const Span& span);

  const Machine machine_;
  Simulation simulation_;
  const std::unique_ptr<TimelineFile> timeline_;
  const std::unique_ptr<PacedClock> paced_;
  bool has_waited_ = true;                                           // since the newest launch
  std::map<int, Cache> caches_;                                      // by device
  std::vector<uint64_t> awaited_;                                    // records, by the next launch
  std::map<std::string, std::vector<int64_t>, std::less<>> placed_;  // ranks of groups, by name
  const PlanPtr record_plan_;
  const PlanPtr wait_plan_;
  Time host_ = 0;
  Time waited_ = 0;      // by the host for the device, since the last step
  Time all_waited_ = 0;  // likewise, since the process began
  std::unordered_map<uint64_t, uint64_t> records_;  // event -> its newest record
  std::unordered_map<uint64_t, uint64_t> events_;   // the reverse, until it is reached
  std::unordered_map<uint64_t, Time> times_;        // event -> when that was reached, if it was
  std::unordered_map<uint32_t, std::vector<Captured>> captured_;  // by graph
  std::map<std::pair<int, int>, int> side_streams_;
  uint32_t label_ = 0;
  int64_t routed_numerator_ = 1;
  int64_t routed_denominator_ = 1;
};

}  // namespace vnpu::timing
