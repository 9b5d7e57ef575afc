#include "collective/bridge_receiver.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace vnpu {
namespace {

constexpr size_t kLargestContent = size_t{16} << 20;  // bytes: more than any frame has

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

BridgeReceiver::BridgeReceiver(BridgeEnds& ends, uint32_t from)
    : ends_(ends),
      segment_(*ends.segment),
      carrier_(*ends.carrier),
      from_(from),
      ranks_(static_cast<uint32_t>(ends.places.size())),
      here_(ends.ranks_of[ends.places[ends.rank].number]) {}

void BridgeReceiver::run() {
  const auto receive = [&](void* data, size_t bytes) {
    carrier_.receive(from_, Carrier::Channel::kNews, data, bytes, kMessageLimit);
    theirs().heard_ns.store(now_ns(), std::memory_order_release);
  };
  for (bool goes_on = true; goes_on;) {
    receive(&envelope_, sizeof(envelope_));
    const Frame& frame = envelope_.frame;
    require(frame.bytes <= kLargestContent);
    if (frame.bytes <= Envelope::kContent) {
      goes_on = take_in(frame, std::span(envelope_.content.data(), frame.bytes));
      continue;
    }
    content_.resize(frame.bytes);
    std::memcpy(content_.data(), envelope_.content.data(), Envelope::kContent);
    receive(content_.data() + Envelope::kContent, frame.bytes - Envelope::kContent);
    goes_on = take_in(frame, content_);
  }
}

bool BridgeReceiver::take_in(const Frame& frame, std::span<const std::byte> content) {
  switch (frame.kind) {
    case Frame::Kind::kAlive: return true;
    case Frame::Kind::kState: take_in_state(frame, content); return true;
    case Frame::Kind::kRound: take_in_round(frame, content); return true;
    case Frame::Kind::kChunk: take_in_chunk(frame, content); return true;
    case Frame::Kind::kReceived:
      require(frame.peer < ranks_ && ends_.is_here(frame.peer));
      segment_.mailbox(frame.peer, from_).received.store(frame.number, std::memory_order_release);
      segment_.rank(frame.peer).bell.ring();
      return true;
    case Frame::Kind::kOffer: take_in_offer(frame, content); return true;
    case Frame::Kind::kObstacle: take_in_obstacle(content); return true;
    case Frame::Kind::kFailure: take_in_failure(frame, content); return true;
    case Frame::Kind::kEnd: {
      theirs().state.store(frame.number, std::memory_order_release);
      ring_all();
      const Receipt receipt = 1;
      carrier_.send(from_, Carrier::Channel::kReceipts, &receipt, sizeof(receipt), kMessageLimit);
      return false;
    }
  }
  require(false);
  return false;
}

void BridgeReceiver::take_in_state(const Frame& frame, std::span<const std::byte> content) {
  require(content.size() == sizeof(ProcessIdentity));
  std::memcpy(&theirs().process, content.data(), content.size());
  theirs().device = static_cast<int32_t>(frame.peer);
  theirs().state.store(frame.number, std::memory_order_release);
  ring_all();
}

void BridgeReceiver::take_in_round(const Frame& frame, std::span<const std::byte> content) {
  if (frame.is_first != 0) {
    const size_t sizes = size_t{2} * ranks_ * sizeof(uint64_t);
    require(content.size() >= sizeof(FirstOfCollective) + sizes);
    FirstOfCollective first;
    std::memcpy(&first, content.data(), sizeof(first));
    theirs().announcements[frame.sequence % 2] = first.announcement;
    std::memcpy(theirs().call_sites[frame.sequence % 2], first.call_site, kCallSite);
    std::memcpy(segment_.sizes(from_, frame.sequence), content.data() + sizeof(first), sizes);
    content = content.subspan(sizeof(first) + sizes);
  }
  std::byte* const slot = segment_.slot(from_, frame.number - 1);
  const auto [stride, bytes] = frame.use;
  if (stride == 0) {
    require(bytes <= Segment::kSlot && content.size() == bytes);
    std::memcpy(slot, content.data(), bytes);
  } else {
    require(content.size() == here_.size() * bytes &&
            size_t{ranks_ - 1} * stride + bytes <= Segment::kSlot);
    for (size_t i = 0; i < here_.size(); ++i) {
      std::memcpy(slot + size_t{here_[i]} * stride, content.data() + i * bytes, bytes);
    }
  }
  theirs().posted.store(frame.number, std::memory_order_release);
  ring_all();
}

void BridgeReceiver::take_in_chunk(const Frame& frame, std::span<const std::byte> content) {
  require(frame.peer < ranks_ && ends_.is_here(frame.peer) &&
          content.size() >= sizeof(Mailbox::Label));
  Mailbox& box = segment_.mailbox(from_, frame.peer);
  const uint32_t chunk = frame.number - 1;
  Mailbox::Label& label = box.labels[chunk % Mailbox::kDepth];
  std::memcpy(&label, content.data(), sizeof(label));
  require(label.chunk_bytes <= Mailbox::kChunk &&
          content.size() == sizeof(label) + label.chunk_bytes);
  std::memcpy(segment_.mailbox_chunk(from_, frame.peer, chunk), content.data() + sizeof(label),
              label.chunk_bytes);
  box.sent.store(frame.number, std::memory_order_release);
  segment_.rank(frame.peer).bell.ring();
}

void BridgeReceiver::take_in_offer(const Frame& frame, std::span<const std::byte> content) {
  Offer& offer = theirs().offer;
  require(content.size() == sizeof(offer.signature) + sizeof(offer.invitation));
  offer.version.store(frame.number - 1, std::memory_order_release);
  std::memcpy(&offer.signature, content.data(), sizeof(offer.signature));
  std::memcpy(&offer.invitation, content.data() + sizeof(offer.signature),
              sizeof(offer.invitation));
  offer.version.store(frame.number, std::memory_order_release);
  ring_all();
}

void BridgeReceiver::take_in_obstacle(std::span<const std::byte> content) {
  require(content.empty() || content.size() == sizeof(Obstacle));
  Obstacle& obstacle = theirs().obstacle;
  obstacle.state.store(1, std::memory_order_release);
  // The state is not copied, because it tells whether this host's copy is complete.
  constexpr size_t kText = offsetof(Obstacle, sequence);
  if (!content.empty()) {
    std::memcpy(reinterpret_cast<std::byte*>(&obstacle) + kText, content.data() + kText,
                sizeof(Obstacle) - kText);
  }
  obstacle.state.store(content.empty() ? 0 : 2, std::memory_order_release);
}

void BridgeReceiver::take_in_failure(const Frame& frame, std::span<const std::byte> content) {
  SegmentHeader& header = segment_.header();
  require(content.size() == sizeof(header.failure_text));
  uint32_t none = 0;
  if (!header.failure_state.compare_exchange_strong(none, 1)) return;
  header.failure_kind = frame.number;
  std::memcpy(header.failure_text, content.data(), content.size());
  header.failure_text[sizeof(header.failure_text) - 1] = '\0';
  header.failure_state.store(2, std::memory_order_release);
  ring_all();
}

void BridgeReceiver::ring_all() {
  for (const uint32_t rank : here_) segment_.rank(rank).bell.ring();
}

void BridgeReceiver::require(bool is_valid) const {
  if (is_valid) return;
  throw std::runtime_error("rank " + std::to_string(from_) + " sent an invalid message");
}

}  // namespace vnpu
