#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "collective/bridge_ends.h"
#include "collective/bridge_frames.h"

namespace vnpu {

// Sends a rank's writes to one other host, in order.
class BridgeSender {
 public:
  BridgeSender(BridgeEnds& ends, uint32_t host);
  // Runs until the rank has left and the other host knows; throws if that host cannot be reached.
  void run();

 private:
  RankBlock& own() const { return segment_.rank(rank_); }
  bool send_news();
  bool send_state();
  bool send_rounds();
  void send_round(uint32_t posted);
  bool send_chunks(uint32_t to);
  bool send_received(uint32_t from);
  bool send_offer();
  bool send_obstacle();
  bool send_failure();
  void send_end();

  void add(const void* data, size_t bytes);
  // Sends the frame with what has been added.
  void send(Frame frame);

  BridgeEnds& ends_;
  Segment& segment_;
  Carrier& carrier_;
  const uint32_t rank_;
  const uint32_t ranks_;
  const std::vector<uint32_t>& there_;  // ranks of the other host
  const uint32_t receiver_;
  Envelope envelope_{};
  std::vector<std::byte> content_;
  std::chrono::steady_clock::time_point sent_at_{};
  // State that the other host has received.
  uint32_t state_ = 0;
  uint32_t posted_ = 0;
  uint64_t sequence_ = 0;
  std::vector<uint32_t> chunks_;    // by destination
  std::vector<uint32_t> received_;  // by source
  uint32_t offer_ = 0;
  bool knows_failure_ = false;
  uint64_t obstacle_ = 0;  // sequence of it
  char obstacle_group_[sizeof(Obstacle::group)] = "";
};

}  // namespace vnpu
