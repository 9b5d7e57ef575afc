#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "device/cores.h"
#include "timing/resources.h"
#include "timing/work.h"

namespace vnpu::timing {

// A chip and the links between chips, as figures in base units: operations, bytes and ranks, per
// second where they are rates, picoseconds, and millionths for shares.
class Machine {
 public:
  // Parses "NAME=INTEGER;..." with every figure of figure_names() once and, for each tier of links,
  // innermost first, tier0_ranks, tier0_bandwidth, tier0_share, tier0_all_to_all_share and
  // tier0_latency. Throws Failure(kInvalidArgument) that names the figure.
  explicit Machine(std::string_view text);
  static std::vector<std::string> figure_names();  // without the tiers'

  struct Tier {
    int64_t ranks = 1;      // of a unit; above the first tier: units of the tier below
    int64_t bandwidth = 0;  // bytes per second of one rank, one way, to all others of its unit
    int64_t share = 0;      // millionths of the bandwidth that a collective reaches
    int64_t all_to_all_share = 0;  // millionths that an all-to-all reaches
    Time latency = 0;
  };

  // cached_bytes: bytes that the work reads and that are in L2. allowed: the cores that it may use,
  // if not all; each core has an equal share of the bandwidth to L2.
  std::vector<Phase> phases_of(const Work& work, int64_t cached_bytes = 0,
                               const std::optional<Cores>& allowed = std::nullopt) const;
  std::vector<Phase> phases_of(const Collective& collective) const;
  enum class Direction { kIn, kOut, kWithin };
  std::vector<Phase> phases_of_copy(Direction direction, int64_t bytes) const;
  // Bytes of memory on their way into L2.
  std::vector<Phase> phases_of_prefetch(int64_t bytes) const;

  // Host time of a call before it returns.
  struct HostCosts {
    Time operator_launch = 0;
    Time collective_launch = 0;
    Time copy_launch = 0;
    Time graph_launch = 0;
    Time event_call = 0;
    Time synchronize = 0;  // after the awaited work is done
    // An engine's own time for a step, beside its calls, and what each request adds to it.
    Time step = 0;
    Time step_request = 0;
  };
  const HostCosts& host() const { return host_; }
  // Times of a device.
  Time event_record() const { return event_record_; }
  Time event_wait() const { return event_wait_; }
  Time graph_node() const { return graph_node_; }
  Time task_jitter() const { return task_jitter_; }
  int64_t queue_depth() const { return queue_depth_; }
  // Number of hardware queues of a device, and the time to switch one to another stream.
  int64_t hardware_queues() const { return hardware_queues_; }
  Time queue_change() const { return queue_change_; }
  int64_t l2_bytes() const { return l2_bytes_; }

 private:
  Time matrix_time(const MatrixProduct& product, int64_t share, int64_t cores) const;
  Time memory_time(int64_t bytes) const;
  int64_t read_again(const MatrixProduct& product) const;
  std::vector<int64_t> spans_of(const Collective& collective) const;

  int64_t cube_cores_ = 0;
  int64_t vector_cores_ = 0;
  int64_t cube_int8_ = 0;
  int64_t cube_float16_ = 0;
  int64_t cube_bfloat16_ = 0;
  int64_t cube_float32_ = 0;
  int64_t vector_16bit_ = 0;
  int64_t vector_32bit_ = 0;
  int64_t matmul_share_ = 0;
  int64_t attention_share_ = 0;
  int64_t vector_share_ = 0;
  int64_t hbm_bandwidth_ = 0;
  int64_t hbm_share_ = 0;
  int64_t l2_bytes_ = 0;
  int64_t l2_bandwidth_ = 0;
  int64_t copy_in_bandwidth_ = 0;
  int64_t copy_out_bandwidth_ = 0;
  Time vector_static_ = 0;
  Time matmul_static_ = 0;
  Time attention_static_ = 0;
  Time collective_static_ = 0;
  Time task_jitter_ = 0;
  Time copy_static_ = 0;
  Time ai_cpu_static_ = 0;
  Time event_record_ = 0;
  Time event_wait_ = 0;
  Time graph_node_ = 0;
  int64_t queue_depth_ = 0;
  int64_t hardware_queues_ = 0;
  Time queue_change_ = 0;
  HostCosts host_;
  std::vector<Tier> tiers_;

  struct Figure {
    const char* name;
    int64_t Machine::* member;
  };
  static const std::vector<Figure>& figures();
};

}  // namespace vnpu::timing
