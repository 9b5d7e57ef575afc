#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace vnpu::race {

// For each stream, how many of its launches are known to have finished.
class VectorClock {
 public:
  uint64_t of(size_t stream) const { return stream < counts_.size() ? counts_[stream] : 0; }
  void set(size_t stream, uint64_t count) {
    if (stream >= counts_.size()) counts_.resize(stream + 1, 0);
    counts_[stream] = count;
  }
  void join(const VectorClock& other) {
    if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size(), 0);
    for (size_t i = 0; i < other.counts_.size(); ++i) {
      counts_[i] = std::max(counts_[i], other.counts_[i]);
    }
  }

 private:
  std::vector<uint64_t> counts_;
};

}  // namespace vnpu::race
