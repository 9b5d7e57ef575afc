#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/bridge_ends.h"

namespace vnpu {

// Keeps the segments of a group on several hosts alike, for one of its ranks. What this rank writes
// into its host's segment goes to one rank of each other host, which writes it into its own; so the
// ranks of a host share the work of taking in what comes. Everything else, reductions and checks
// among it, works on the segment as if all ranks were on one host.
//
// A rank overwrites nothing that a slow bridge still has to send: it needs the others' answer to it
// before, of which each follows from the arrival.
class Bridge : public std::enable_shared_from_this<Bridge> {
 public:
  // A rank that sends nothing for this long counts as lost with its host or network: a live rank
  // sends a heartbeat every 2 s.
  static constexpr std::chrono::seconds kSilence{20};

  // Starts the threads, which keep it until all ranks have left.
  static std::shared_ptr<Bridge> start(const Meeting& meeting, std::shared_ptr<Segment> segment,
                                       uint32_t rank);
  Bridge(const Meeting& meeting, std::shared_ptr<Segment> segment, uint32_t rank);

  // This rank has written something.
  void notify() { ends_.news.ring(); }
  // Lets all hosts know what has been written and that this rank leaves; returns when they do, or
  // when `limit` is up.
  void leave(std::chrono::milliseconds limit);
  // Why a rank of another host cannot be waited for any longer, to follow its name: " has ...";
  // empty while it can.
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
