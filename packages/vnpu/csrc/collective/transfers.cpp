#include "collective/transfers.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <utility>

#include "collective/phantom.h"
#include "device/checked_sizes.h"
#include "device/configuration.h"
#include "device/faults.h"
#include "device/memory.h"
#include "device/observer.h"

namespace vnpu {
namespace {

constexpr size_t kChunk = Mailbox::kChunk;

size_t chunk_bytes(size_t message_bytes, uint32_t chunk) {
  const size_t begin = std::min(size_t{chunk} * kChunk, message_bytes);
  return std::min(kChunk, message_bytes - begin);
}

std::string describe(uint64_t bytes, ElementType type) {
  return std::to_string(bytes / size_of(type)) + " x " + name_of(type);
}

}  // namespace

Transfers::Transfers(GroupPtr group, const char* name, const std::vector<Transfer>& transfers)
    : Task(name), group_(std::move(group)), call_site_(Observers::instance().call_site()) {
  const Memory& memory = Memory::instance();
  for (const Transfer& each : transfers) {
    if (each.peer >= group_->ranks()) {
      throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: ") + name + " names rank " +
                                                       std::to_string(each.peer) + " in group " +
                                                       group_->name() + " of " +
                                                       std::to_string(group_->ranks()) + " ranks.");
    }
    const size_t bytes =
        checked_multiply<size_t>(each.count, size_of(each.type), "the size of a message");
    if (bytes > 0) {
      memory.check(each.buffer, bytes, name);
      const auto begin = reinterpret_cast<uintptr_t>(each.buffer);
      touched.add({begin, begin + bytes, each.direction == Transfer::Direction::kReceive});
    }
    const auto chunks = static_cast<uint32_t>(std::max<size_t>(1, (bytes + kChunk - 1) / kChunk));
    messages_.push_back(
        Message{each, static_cast<std::byte*>(memory.backing(each.buffer)), bytes, chunks});
  }
}

Transfers::~Transfers() { release_turns(); }

void Transfers::release_turns() {
  for (const Message& message : messages_) turn(message).release(this);
}

void Transfers::rewind() {
  for (Message& message : messages_) {
    message.done = 0;
    message.complete = false;
  }
  waited_.waiting = false;
  outside_ = false;
}

Group::Turn& Transfers::turn(const Message& message) const {
  return message.transfer.direction == Transfer::Direction::kSend
             ? group_->send_turns[message.transfer.peer]
             : group_->receive_turns[message.transfer.peer];
}

bool Transfers::waits_for(uint32_t rank) const {
  return std::any_of(messages_.begin(), messages_.end(), [&](const Message& message) {
    return !message.complete && message.transfer.peer == rank;
  });
}

std::string Transfers::waiting_for() const {
  std::string text;
  for (const Message& message : messages_) {
    if (message.complete) continue;
    const bool sends = message.transfer.direction == Transfer::Direction::kSend;
    text += (text.empty() ? "" : ", ") + group_->describe(message.transfer.peer) + " to " +
            (sends ? "receive " : "send ") + describe(message.bytes, message.transfer.type);
  }
  return text + " in group " + group_->name();
}

void Transfers::send(Message& message) {
  const uint32_t peer = message.transfer.peer;
  Segment& segment = group_->segment();
  Mailbox& box = segment.mailbox(group_->rank(), peer);
  const uint32_t begin = message.done;
  while (message.done < message.chunks) {
    const uint32_t sent = box.sent.load(std::memory_order_relaxed);
    if (sent - box.received.load(std::memory_order_acquire) >= Mailbox::kDepth) break;
    faults::reach(faults::Kind::kCollective, "send", faults::Phase::kPut);
    Mailbox::Label& label = box.labels[sent % Mailbox::kDepth];
    label.message_bytes = message.bytes;
    label.chunk_bytes = static_cast<uint32_t>(chunk_bytes(message.bytes, message.done));
    label.type = static_cast<uint32_t>(message.transfer.type);
    if (Observers::instance().needs().call_sites) {
      std::snprintf(label.call_site, kCallSite, "%s", call_site_.c_str());
    }
    if (Configuration::instance().compute) {
      std::memcpy(segment.mailbox_chunk(group_->rank(), peer, sent),
                  message.data + size_t{message.done} * kChunk, label.chunk_bytes);
    }
    box.sent.store(sent + 1, std::memory_order_release);
    ++message.done;
  }
  if (message.done != begin) group_->ring(peer);
}

void Transfers::receive(Message& message) {
  const uint32_t peer = message.transfer.peer;
  Segment& segment = group_->segment();
  Mailbox& box = segment.mailbox(peer, group_->rank());
  const uint32_t begin = message.done;
  while (message.done < message.chunks) {
    const uint32_t received = box.received.load(std::memory_order_relaxed);
    if (box.sent.load(std::memory_order_acquire) == received) break;
    faults::reach(faults::Kind::kCollective, "receive", faults::Phase::kGet);
    const Mailbox::Label& label = box.labels[received % Mailbox::kDepth];
    if (label.message_bytes != message.bytes ||
        label.type != static_cast<uint32_t>(message.transfer.type)) {
      group_->fail(
          FailureKind::kInvalidArgument,
          "vnpu: mismatched message in group " + group_->name() + ": " + group_->describe(peer) +
              " sends " + describe(label.message_bytes, static_cast<ElementType>(label.type)) +
              " to " + group_->describe(group_->rank()) + ", which expects " +
              describe(message.bytes, message.transfer.type) +
              ". Sends and receives between two ranks must match in order, size and type." +
              (*label.call_site == '\0' ? "" : std::string("\n  sent at") + label.call_site) +
              (call_site_.empty() ? "" : "\n  expected at" + call_site_));
    }
    if (Configuration::instance().compute) {
      std::memcpy(message.data + size_t{message.done} * kChunk,
                  segment.mailbox_chunk(peer, group_->rank(), received),
                  chunk_bytes(message.bytes, message.done));
    }
    box.received.store(received + 1, std::memory_order_release);
    ++message.done;
  }
  if (message.done != begin) group_->ring(peer);
}

void Transfers::proceed(Message& message) {
  const uint32_t before = message.done;
  if (message.transfer.direction == Transfer::Direction::kSend) {
    send(message);
  } else {
    receive(message);
  }
  if (message.done != before) waited_.waiting = false;
  if (message.done < message.chunks) return;
  message.complete = true;
  turn(message).release(this);
}

Progress Transfers::advance() {
  if (ranks_are_phantoms()) return Progress::kDone;
  try {
    group_->throw_if_failed();
    seen_ = group_->rings();
    bool outside = false;
    bool complete = true;
    std::set<std::pair<Transfer::Direction, uint32_t>> busy;  // a message before it is under way
    for (Message& message : messages_) {
      if (message.complete) continue;
      const auto way = std::pair(message.transfer.direction, message.transfer.peer);
      if (busy.count(way) == 0 && turn(message).take(this)) {
        proceed(message);
        outside = outside || !message.complete;
      }
      if (message.complete) continue;
      busy.insert(way);
      complete = false;
    }
    outside_ = outside;
    if (complete) {
      rewind();
      return Progress::kDone;
    }
    group_->check(
        waited_, [this](uint32_t r) { return waits_for(r); }, [this] { return std::string(name); },
        call_site_);
    return Progress::kBlocked;
  } catch (...) {
    group_->fail_with_current(name, 0);
    release_turns();
    throw;
  }
}

}  // namespace vnpu
