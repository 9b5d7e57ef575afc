#pragma once

#include <cstddef>
#include <vector>

#include "collective/collective.h"

namespace vnpu {

// An all-to-all whose sizes are known only when it runs: every rank composes one message for each
// rank, and receives each rank's message as a whole.
class MessageExchange : public Collective {
 protected:
  using Messages = std::vector<std::vector<std::byte>>;  // by rank

  using Collective::Collective;

  // The messages for each rank, this one included. May end in group().fail(): all ranks then fail.
  virtual Messages compose() = 0;
  // Takes what all ranks have sent here.
  virtual void deliver(const Messages& received) = 0;

 private:
  void prepare() final;
  uint32_t rounds() const final;
  void announce_sizes(uint64_t* sizes) final;
  void compare_sizes() final;
  SlotUse put(uint32_t round, std::byte* slot) final;
  void get(uint32_t round, std::span<const std::byte* const> slots) final;
  // Bytes of a slot for each rank.
  size_t step() const;

  Messages sent_;
  Messages received_;  // with their final sizes from the first round on
  uint32_t last_round_ = 0;
};

}  // namespace vnpu
