#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/bridge_ends.h"

namespace vnpu {

// Keeps the segments of a group on several hosts equal, for one of its ranks. Data that this rank
// writes into its host's segment are sent to one rank of each other host, which writes them into
// that host's segment; so the ranks of a host share the work of receiving. Everything else, such as
// reductions and checks, uses the segment as if all ranks were on one host. No flow control is
// needed: before a rank overwrites data that a slow bridge may still have to send, it waits for
// answers of the other ranks that depend on the arrival of these data.
class Bridge : public std::enable_shared_from_this<Bridge> {
 public:
  // A rank that sends nothing for this long counts as lost with its host or network: a live rank
  // sends a heartbeat every 2 s.
  static constexpr std::chrono::seconds kSilence{20};

  // Starts the threads, which keep this object alive until all ranks have left.
  static std::shared_ptr<Bridge> start(const Meeting& meeting, std::shared_ptr<Segment> segment,
                                       uint32_t rank);
  Bridge(const Meeting& meeting, std::shared_ptr<Segment> segment, uint32_t rank);

  // This rank has written something.
  void notify() { ends_.news.ring(); }
  // Sends the remaining writes and the end of this rank to all hosts; returns when they have them,
  // or after `limit`.
  void leave(std::chrono::milliseconds limit);
  // Why waiting for a rank of another host is pointless, as text that follows the rank's name: "
  // has ..."; empty if it is not.
  std::string loss_of(uint32_t rank) const;

 private:
  bool is_needed() const;
  void send_to(uint32_t host);
  void receive_from(uint32_t rank);
  void finish_at_exit();
  static void finish_all_at_exit();

  BridgeEnds ends_;
  const int process_;
  std::atomic<uint32_t> senders_{0};  // threads that have not ended
  std::atomic<uint32_t> receivers_{0};
};

}  // namespace vnpu
