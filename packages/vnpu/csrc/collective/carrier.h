#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace vnpu {

// Brings bytes from one rank of a group to another, on another host. Messages of one channel
// between two ranks arrive in order and whole; their sizes are known to both. A channel between two
// ranks has one sending and one receiving thread. Every call throws once the other rank cannot be
// reached.
class Carrier {
 public:
  enum class Channel : uint8_t { kNews = 1, kReceipts = 2 };

  Carrier() = default;
  virtual ~Carrier() = default;
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  // Returns when the other rank has asked for the message and the memory may be used again.
  virtual void send(uint32_t to, Channel channel, const void* data, size_t bytes,
                    std::chrono::milliseconds limit) = 0;
  virtual void receive(uint32_t from, Channel channel, void* data, size_t bytes,
                       std::chrono::milliseconds limit) = 0;
  // Makes all calls throw: calls in progress in other threads, and later ones.
  virtual void close() = 0;
};

}  // namespace vnpu
