#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "collective/segment.h"

// Messages between bridges of two hosts: an envelope, followed by the content that does not fit
// into it.
namespace vnpu {

struct Frame {
  enum class Kind : uint32_t {
    kAlive,     // nothing new
    kState,     // number: RankState; content: ProcessIdentity; peer: device
    kRound,     // number: rounds posted; content: FirstOfCollective if is_first, then the slot
    kChunk,     // for `peer`; number: chunks sent; content: Mailbox::Label, then the chunk
    kReceived,  // to `peer`; number: chunks received
    kOffer,     // number: Offer's version; content: signature and invitation
    kObstacle,  // content: Obstacle; none: there is none any longer
    kFailure,   // number: FailureKind; content: the text
    kEnd,       // number: RankState; nothing follows
  };
  Kind kind;
  uint32_t number;
  uint32_t peer;
  uint32_t is_first;  // round of a collective
  uint64_t sequence;  // of the collective
  SlotUse use;
  uint64_t bytes;  // of the content
};

struct Envelope {
  static constexpr size_t kContent = 8192;  // bytes: all of a small round
  Frame frame;
  std::array<std::byte, kContent> content;
};

// Before the slot's data, where a collective begins; after it follow the rank's sizes.
struct FirstOfCollective {
  Announcement announcement;
  char call_site[kCallSite];
};

// The receipt of kEnd.
using Receipt = uint32_t;

constexpr std::chrono::seconds kAliveInterval{2};
// Longest wait for one message, longer than any rank is silent. Then the connection ends, which the
// other side notices.
constexpr std::chrono::hours kMessageLimit{1};

}  // namespace vnpu
