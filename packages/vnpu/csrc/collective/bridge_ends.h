#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/meeting.h"
#include "collective/segment.h"

namespace vnpu {

// State that the threads of a bridge share: the ranks' addresses, and the memory that they keep
// equal.
struct BridgeEnds {
  BridgeEnds(const Meeting& meeting, std::shared_ptr<Segment> shared, uint32_t own)
      : places(meeting.places), segment(std::move(shared)), carrier(meeting.carrier), rank(own) {
    for (uint32_t r = 0; r < places.size(); ++r) {
      ranks_of.resize(std::max<size_t>(ranks_of.size(), places[r].number + 1));
      ranks_of[places[r].number].push_back(r);
    }
  }

  uint32_t here() const { return places[rank].number; }
  bool is_here(uint32_t r) const { return places[r].number == here(); }
  // The rank of `host` that receives the writes of rank `r` of another host.
  uint32_t receiver_of(uint32_t r, uint32_t host) const {
    const std::vector<uint32_t>& theirs = ranks_of[places[r].number];
    const auto position = std::find(theirs.begin(), theirs.end(), r) - theirs.begin();
    return ranks_of[host][static_cast<size_t>(position) % ranks_of[host].size()];
  }

  const std::vector<Place> places;
  const std::shared_ptr<Segment> segment;
  const std::shared_ptr<Carrier> carrier;
  const uint32_t rank;                          // whose bridge this is
  std::vector<std::vector<uint32_t>> ranks_of;  // by host
  Bell news{};                                  // rings when the rank has written something
  std::atomic<bool> leaves{false};              // the rank writes nothing more
};

}  // namespace vnpu
