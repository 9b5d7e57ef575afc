#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collective/bridge_ends.h"
#include "collective/bridge_frames.h"

namespace vnpu {

// Copies the writes of a rank of another host into this host's segment.
class BridgeReceiver {
 public:
  BridgeReceiver(BridgeEnds& ends, uint32_t from);
  // Runs until that rank has left; throws if it cannot be reached.
  void run();

 private:
  RankBlock& theirs() const { return segment_.rank(from_); }
  // False after the last frame.
  bool take_in(const Frame& frame, std::span<const std::byte> content);
  void take_in_state(const Frame& frame, std::span<const std::byte> content);
  void take_in_round(const Frame& frame, std::span<const std::byte> content);
  void take_in_chunk(const Frame& frame, std::span<const std::byte> content);
  void take_in_offer(const Frame& frame, std::span<const std::byte> content);
  void take_in_obstacle(std::span<const std::byte> content);
  void take_in_failure(const Frame& frame, std::span<const std::byte> content);
  void ring_all();
  // Fails for a frame that no bridge sends.
  void require(bool is_valid) const;

  BridgeEnds& ends_;
  Segment& segment_;
  Carrier& carrier_;
  const uint32_t from_;
  const uint32_t ranks_;
  const std::vector<uint32_t>& here_;  // ranks of this host
  Envelope envelope_{};
  std::vector<std::byte> content_;
};

}  // namespace vnpu
