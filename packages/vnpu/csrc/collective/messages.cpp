#include "collective/messages.h"

#include <algorithm>
#include <cstring>

namespace vnpu {
namespace {

uint32_t rounds_of(const std::vector<std::vector<std::byte>>& messages, size_t step) {
  size_t largest = 0;
  for (const auto& message : messages) largest = std::max(largest, message.size());
  return static_cast<uint32_t>(std::max<size_t>(1, (largest + step - 1) / step));
}

}  // namespace

size_t MessageExchange::step() const {
  return Segment::kSlot / group().ranks() / Segment::kCacheLine * Segment::kCacheLine;
}

void MessageExchange::prepare() { sent_ = compose(); }

uint32_t MessageExchange::rounds() const { return rounds_of(sent_, step()); }

void MessageExchange::announce_sizes(uint64_t* sizes) {
  for (size_t r = 0; r < sent_.size(); ++r) sizes[r] = sent_[r].size();
}

void MessageExchange::compare_sizes() {
  received_.assign(group().ranks(), {});
  if (sent_.empty()) return;  // nothing is computed, so nothing is moved
  for (uint32_t r = 0; r < group().ranks(); ++r) {
    received_[r].resize(group().segment().sizes(r, sequence())[group().rank()]);
  }
  last_round_ = rounds_of(received_, step()) - 1;
}

SlotUse MessageExchange::put(uint32_t round, std::byte* slot) {
  const size_t begin = round * step();
  size_t largest = 0;
  for (size_t r = 0; r < sent_.size(); ++r) {
    if (begin >= sent_[r].size()) continue;
    const size_t bytes = std::min(step(), sent_[r].size() - begin);
    std::memcpy(slot + r * step(), sent_[r].data() + begin, bytes);
    largest = std::max(largest, bytes);
  }
  return {static_cast<uint32_t>(step()), static_cast<uint32_t>(largest)};
}

void MessageExchange::get(uint32_t round, std::span<const std::byte* const> slots) {
  const size_t begin = round * step();
  for (size_t r = 0; r < slots.size(); ++r) {
    if (begin >= received_[r].size()) continue;
    std::memcpy(received_[r].data() + begin, slots[r] + group().rank() * step(),
                std::min(step(), received_[r].size() - begin));
  }
  if (round != last_round_) return;
  deliver(received_);
  received_.clear();
}

}  // namespace vnpu
