#include "ops/matmul/blocked_weights.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "device/memory.h"
#include "device/memory_watch.h"
#include "ops/float_rows.h"

namespace vnpu::ops {
namespace {

// Narrow weights in narrow blocks, so that every thread gets some.
constexpr int64_t kNarrowWeight = 1024;
constexpr int64_t kNarrowBlock = 32;
constexpr int64_t kWideBlock = 64;
constexpr int64_t kPiece = 16;  // rows and columns that are turned around together

// Writes rows of `step` columns, of which the first `width` come from the weight.
struct Target {
  int64_t width, step;
};

// Turns 4-byte elements around: column j lies at from + j * stride.
void transpose(const std::byte* from, int64_t stride_bytes, int64_t depth, const Target& target,
               uint32_t* to) {
  for (int64_t k0 = 0; k0 < depth; k0 += kPiece) {
    const int64_t k1 = std::min(k0 + kPiece, depth);
    for (int64_t j = 0; j < target.width; ++j) {
      const std::byte* const column = from + j * stride_bytes;
      for (int64_t k = k0; k < k1; ++k) {
        std::memcpy(&to[k * target.step + j], column + 4 * k, sizeof(uint32_t));
      }
    }
  }
}

// A pair of rows for each column, the lower row first.
void write_pairs(const Weight& weight, const uint16_t* first, const Target& target, uint32_t* out) {
  const int64_t pairs = weight.depth / 2;
  if (weight.depth_stride == 1) {
    transpose(reinterpret_cast<const std::byte*>(first), weight.column_stride * 2, pairs, target,
              out);
  } else {
    for (int64_t p = 0; p < pairs; ++p) {
      const uint16_t* const low = first + 2 * p * weight.depth_stride;
      const uint16_t* const high = low + weight.depth_stride;
      for (int64_t j = 0; j < target.width; ++j) {
        out[p * target.step + j] = low[j] | static_cast<uint32_t>(high[j]) << 16;
      }
    }
  }
  if (weight.depth % 2 == 0) return;
  const uint16_t* const last = first + (weight.depth - 1) * weight.depth_stride;
  for (int64_t j = 0; j < target.width; ++j) {
    out[pairs * target.step + j] = last[j * weight.column_stride];
  }
}

void write_floats(const Weight& weight, const float* first, const Target& target, float* out) {
  if (weight.depth_stride == 1) {
    transpose(reinterpret_cast<const std::byte*>(first), weight.column_stride * 4, weight.depth,
              target, reinterpret_cast<uint32_t*>(out));
    return;
  }
  for (int64_t k = 0; k < weight.depth; ++k) {
    std::memcpy(out + k * target.step, first + k * weight.depth_stride,
                static_cast<size_t>(target.width) * sizeof(float));
  }
}

void write_widened(const Weight& weight, const at::Half* first, const Target& target, float* out) {
  for (int64_t k = 0; k < weight.depth; ++k) {
    const at::Half* const row = first + k * weight.depth_stride;
    for (int64_t j = 0; j < target.width; ++j) {
      out[k * target.step + j] = row[j * weight.column_stride];
    }
  }
}

struct Hash {
  size_t operator()(const Weight& weight) const {
    size_t hash = std::hash<const void*>()(weight.data);
    for (const int64_t part : {weight.depth, weight.columns, weight.depth_stride}) {
      hash = hash * 31 + static_cast<size_t>(part);
    }
    return hash;
  }
};

size_t host_bytes() {
  return static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<size_t>(::sysconf(_SC_PAGE_SIZE));
}

// Device addresses from the first element to the last.
MemoryRange range_of(const Weight& weight, const void* address) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const int64_t elements =
      (weight.depth - 1) * weight.depth_stride + (weight.columns - 1) * weight.column_stride + 1;
  return {begin, begin + static_cast<size_t>(elements) * at::elementSize(weight.dtype)};
}

}  // namespace

Blocking::Blocking(const Weight& weight)
    : dtype(weight.dtype == at::kBFloat16 ? at::kBFloat16 : at::kFloat),
      depth(dtype == at::kBFloat16 ? (weight.depth + 1) / 2 * 2 : weight.depth),
      columns(weight.columns <= kNarrowWeight ? kNarrowBlock : kWideBlock),
      total_columns(weight.columns),
      blocks((weight.columns + columns - 1) / columns),
      block_bytes(static_cast<size_t>(depth * columns) * at::elementSize(dtype)) {}

void write_block(const Weight& weight, const Blocking& blocking, int64_t block, std::byte* out) {
  const int64_t first = block * blocking.columns * weight.column_stride;
  const Target target{blocking.width(block), blocking.padded_width(block)};
  if (target.step != target.width) std::memset(out, 0, blocking.block_bytes);
  switch (weight.dtype) {
    case at::kBFloat16:
      write_pairs(weight, static_cast<const uint16_t*>(weight.data) + first, target,
                  reinterpret_cast<uint32_t*>(out));
      return;
    case at::kHalf:
      write_widened(weight, static_cast<const at::Half*>(weight.data) + first, target,
                    reinterpret_cast<float*>(out));
      return;
    default:
      write_floats(weight, static_cast<const float*>(weight.data) + first, target,
                   reinterpret_cast<float*>(out));
  }
}

struct BlockedWeights::Implementation {
  struct Kept {
    uint64_t number = 0;
    MemoryWatch::WatchedPtr watched;
    Blocks blocks;  // null after the first use
    size_t bytes = 0;
  };

  void forget(const Weight& weight, uint64_t number) {
    Blocks last_owner;  // freed after the lock
    std::lock_guard lock(mutex);
    const auto found = weights.find(weight);
    if (found == weights.end() || found->second.number != number) return;
    last_owner = std::move(found->second.blocks);
    kept_bytes -= found->second.bytes;
    weights.erase(found);
  }

  // Notes the first use of a weight.
  void remember(const Weight& weight) {
    const void* const address = Memory::instance().device_address(weight.data);
    if (address == nullptr) return;
    const MemoryRange range = range_of(weight, address);
    if (!Memory::instance().is_exclusive(address, range.end - range.begin)) return;
    const uint64_t number = next_number.fetch_add(1, std::memory_order_relaxed);
    const MemoryWatch::WatchedPtr watched =
        MemoryWatch::instance().watch(range, [this, weight, number] { forget(weight, number); });
    MemoryWatch::WatchedPtr before;
    {
      std::lock_guard lock(mutex);
      Kept& kept = weights[weight];
      kept_bytes -= kept.bytes;
      before = std::exchange(kept, Kept{number, watched, nullptr, 0}).watched;
    }
    if (before != nullptr) MemoryWatch::instance().release(before);
  }

  std::shared_mutex mutex;
  std::unordered_map<Weight, Kept, Hash> weights;
  size_t kept_bytes = 0;
  const size_t most_bytes = host_bytes() / 4;
  std::atomic<uint64_t> next_number{1};
};

BlockedWeights::BlockedWeights() : implementation_(std::make_unique<Implementation>()) {}

BlockedWeights& BlockedWeights::instance() {
  // Never destroyed: memory is freed after static destructors have run.
  static BlockedWeights* const weights = new BlockedWeights();
  return *weights;
}

Blocks BlockedWeights::find(const Weight& weight, const Blocking& blocking) {
  Implementation& all = *implementation_;
  const size_t bytes = blocking.block_bytes * static_cast<size_t>(blocking.blocks);
  uint64_t number = 0;
  {
    std::shared_lock lock(all.mutex);
    const auto found = all.weights.find(weight);
    if (found != all.weights.end() && found->second.watched->is_unchanged()) {
      if (found->second.blocks != nullptr) return found->second.blocks;
      if (all.kept_bytes + bytes > all.most_bytes) return nullptr;
      number = found->second.number;
    }
  }
  if (number == 0) {
    all.remember(weight);
    return nullptr;
  }
  const std::shared_ptr<std::byte[]> blocks(
      new (std::align_val_t{64}) std::byte[bytes],
      [](std::byte* p) { ::operator delete[](p, std::align_val_t{64}); });
  at::parallel_for(0, blocking.blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      write_block(weight, blocking, block,
                  blocks.get() + static_cast<size_t>(block) * blocking.block_bytes);
    }
  });
  std::lock_guard lock(all.mutex);
  const auto found = all.weights.find(weight);
  if (found != all.weights.end() && found->second.number == number &&
      found->second.blocks == nullptr) {
    found->second.blocks = blocks;
    found->second.bytes = bytes;
    all.kept_bytes += bytes;
  }
  return blocks;
}

}  // namespace vnpu::ops
