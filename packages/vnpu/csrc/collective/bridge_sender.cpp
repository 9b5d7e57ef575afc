#include "collective/bridge_sender.h"

#include <algorithm>
#include <cstring>

namespace vnpu {
namespace {

// Interval at which a rank's silent updates are polled.
constexpr std::chrono::milliseconds kLookInterval{50};
constexpr std::chrono::seconds kReceiptLimit{5};

}  // namespace

BridgeSender::BridgeSender(BridgeEnds& ends, uint32_t host)
    : ends_(ends),
      segment_(*ends.segment),
      carrier_(*ends.carrier),
      rank_(ends.rank),
      ranks_(static_cast<uint32_t>(ends.places.size())),
      there_(ends.ranks_of[host]),
      receiver_(ends.receiver_of(ends.rank, host)),
      chunks_(ranks_),
      received_(ranks_) {}

void BridgeSender::run() {
  for (;;) {
    const uint32_t seen = ends_.news.rings.load(std::memory_order_acquire);
    const bool leaves = ends_.leaves.load(std::memory_order_acquire);
    const bool has_news = send_news();
    if (leaves) break;
    if (has_news) continue;
    if (std::chrono::steady_clock::now() - sent_at_ >= kAliveInterval) {
      send({Frame::Kind::kAlive, 0, 0, 0, 0, {}, 0});
    }
    ends_.news.wait(seen, kLookInterval);
  }
  send_end();
}

bool BridgeSender::send_news() {
  bool has_news = send_state();
  has_news |= send_failure();
  has_news |= send_offer();
  has_news |= send_obstacle();
  has_news |= send_rounds();
  for (const uint32_t rank : there_) {
    has_news |= send_chunks(rank);
    has_news |= send_received(rank);
  }
  return has_news;
}

bool BridgeSender::send_state() {
  const uint32_t state = own().state.load(std::memory_order_acquire);
  // A rank's end is the last frame that it sends.
  if (state == state_ || state != static_cast<uint32_t>(RankState::kJoined)) return false;
  state_ = state;
  add(&own().process, sizeof(ProcessIdentity));
  send({Frame::Kind::kState, state, static_cast<uint32_t>(own().device), 0, 0, {}, 0});
  return true;
}

bool BridgeSender::send_rounds() {
  const uint32_t posted = own().posted.load(std::memory_order_acquire);
  const bool has_news = posted_ != posted;
  while (posted_ != posted) send_round(++posted_);
  return has_news;
}

void BridgeSender::send_round(uint32_t posted) {
  const uint32_t round = posted - 1;
  const auto [sequence, use] = own().rounds[round % 2];
  const bool is_first = sequence != sequence_;
  sequence_ = sequence;
  if (is_first) {
    add(&own().announcements[sequence % 2], sizeof(Announcement));
    add(own().call_sites[sequence % 2], kCallSite);
    add(segment_.sizes(rank_, sequence), size_t{2} * ranks_ * sizeof(uint64_t));
  }
  const std::byte* const slot = segment_.slot(rank_, round);
  if (use.stride == 0) {
    add(slot, use.bytes);
  } else {
    for (const uint32_t to : there_) add(slot + size_t{to} * use.stride, use.bytes);
  }
  send({Frame::Kind::kRound, posted, 0, is_first ? 1u : 0u, sequence, use, 0});
}

bool BridgeSender::send_chunks(uint32_t to) {
  const Mailbox& box = segment_.mailbox(rank_, to);
  const uint32_t sent = box.sent.load(std::memory_order_acquire);
  const bool has_news = chunks_[to] != sent;
  while (chunks_[to] != sent) {
    const uint32_t chunk = chunks_[to]++;
    const Mailbox::Label& label = box.labels[chunk % Mailbox::kDepth];
    add(&label, sizeof(label));
    add(segment_.mailbox_chunk(rank_, to, chunk), label.chunk_bytes);
    send({Frame::Kind::kChunk, chunk + 1, to, 0, 0, {}, 0});
  }
  return has_news;
}

bool BridgeSender::send_received(uint32_t from) {
  const uint32_t received = segment_.mailbox(from, rank_).received.load(std::memory_order_acquire);
  if (received_[from] == received) return false;
  received_[from] = received;
  send({Frame::Kind::kReceived, received, from, 0, 0, {}, 0});
  return true;
}

bool BridgeSender::send_offer() {
  const Offer& offer = own().offer;
  const uint32_t version = offer.version.load(std::memory_order_acquire);
  if (version == offer_ || version % 2 != 0) return false;
  const uint64_t signature = offer.signature;
  const Invitation invitation = offer.invitation;
  std::atomic_thread_fence(std::memory_order_acquire);
  if (offer.version.load(std::memory_order_relaxed) != version) return false;
  offer_ = version;
  add(&signature, sizeof(signature));
  add(&invitation, sizeof(invitation));
  send({Frame::Kind::kOffer, version, 0, 0, 0, {}, 0});
  return true;
}

bool BridgeSender::send_obstacle() {
  const Obstacle& obstacle = own().obstacle;
  const uint32_t state = obstacle.state.load(std::memory_order_acquire);
  if (state == 1) return false;
  const uint64_t sequence = state == 2 ? obstacle.sequence : 0;
  if (sequence == obstacle_ && (sequence == 0 || std::strncmp(obstacle_group_, obstacle.group,
                                                              sizeof(obstacle_group_)) == 0)) {
    return false;
  }
  obstacle_ = sequence;
  std::memcpy(obstacle_group_, obstacle.group, sizeof(obstacle_group_));
  if (sequence != 0) add(&obstacle, sizeof(obstacle));
  send({Frame::Kind::kObstacle, 0, 0, 0, 0, {}, 0});
  return true;
}

bool BridgeSender::send_failure() {
  const SegmentHeader& header = segment_.header();
  if (knows_failure_ || header.failure_state.load(std::memory_order_acquire) != 2) return false;
  knows_failure_ = true;
  add(header.failure_text, sizeof(header.failure_text));
  send({Frame::Kind::kFailure, header.failure_kind, 0, 0, 0, {}, 0});
  return true;
}

void BridgeSender::send_end() {
  const auto state = static_cast<RankState>(own().state.load(std::memory_order_acquire));
  // A process that ends without leaving the group counts as lost.
  const RankState end = state == RankState::kLeft ? RankState::kLeft : RankState::kLost;
  send({Frame::Kind::kEnd, static_cast<uint32_t>(end), 0, 0, 0, {}, 0});
  // Written data may be lost if this process ends before the peer has read it.
  Receipt receipt = 0;
  carrier_.receive(receiver_, Carrier::Channel::kReceipts, &receipt, sizeof(receipt),
                   kReceiptLimit);
}

void BridgeSender::add(const void* data, size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  content_.insert(content_.end(), begin, begin + bytes);
}

void BridgeSender::send(Frame frame) {
  frame.bytes = content_.size();
  envelope_.frame = frame;
  const size_t inside = std::min(content_.size(), Envelope::kContent);
  std::memcpy(envelope_.content.data(), content_.data(), inside);
  const auto pass_on = [&](const void* data, size_t bytes) {
    carrier_.send(receiver_, Carrier::Channel::kNews, data, bytes, kMessageLimit);
  };
  pass_on(&envelope_, sizeof(envelope_));
  if (content_.size() > inside) pass_on(content_.data() + inside, content_.size() - inside);
  content_.clear();
  sent_at_ = std::chrono::steady_clock::now();
}

}  // namespace vnpu
