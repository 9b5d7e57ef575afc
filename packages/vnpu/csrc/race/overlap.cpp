#include "race/overlap.h"

#include <algorithm>
#include <vector>

namespace vnpu::race {
namespace {

constexpr int64_t kMostBlocks = 1 << 16;  // beyond, ranges that meet count as overlapping

struct Dimension {
  int64_t size;
  int64_t stride;  // bytes, > 0
};

// A layout as nested loops of ascending addresses around one contiguous block.
struct Blocks {
  uintptr_t first = 0;
  int64_t block = 0;             // bytes
  std::vector<Dimension> loops;  // outermost (largest stride) first
  bool nested = true;            // false when loops interleave: then only the range is known

  explicit Blocks(const Access& access) {
    const Access::Layout& layout = access.layout;
    if (layout.item == 0) {
      first = access.begin;
      block = static_cast<int64_t>(access.end - access.begin);
      return;
    }
    first = access.begin;  // also for negative strides: the extent's first byte
    block = layout.item;
    for (int i = 0; i < layout.dims; ++i) {
      loops.push_back({layout.sizes[i], std::abs(layout.strides[i])});
    }
    std::sort(loops.begin(), loops.end(),
              [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
    while (!loops.empty() && loops.back().stride <= block) {
      block = (loops.back().size - 1) * loops.back().stride + block;
      loops.pop_back();
    }
    int64_t inner = block;
    for (auto it = loops.rbegin(); it != loops.rend(); ++it) {
      nested = nested && it->stride >= inner;
      inner = (it->size - 1) * it->stride + inner;
    }
  }
  int64_t count() const {
    int64_t n = 1;
    for (const Dimension& loop : loops) n *= loop.size;
    return n;
  }
};

// True if any byte of the loops from `depth` on lies in [low, high), relative to their start.
bool touches(const Blocks& blocks, size_t depth, int64_t low, int64_t high) {
  if (depth == blocks.loops.size()) return low < blocks.block && high > 0;
  const Dimension& loop = blocks.loops[depth];
  int64_t inner = blocks.block;
  for (size_t i = depth + 1; i < blocks.loops.size(); ++i) {
    inner += (blocks.loops[i].size - 1) * blocks.loops[i].stride;
  }
  const int64_t from = std::max<int64_t>(0, low - inner < 0 ? 0 : (low - inner) / loop.stride);
  const int64_t to = std::min(loop.size - 1, high > 0 ? (high - 1) / loop.stride : -1);
  for (int64_t i = from; i <= to; ++i) {
    if (touches(blocks, depth + 1, low - i * loop.stride, high - i * loop.stride)) return true;
    // At most the first two and the last two can miss; one in between lies fully inside.
    if (i == from + 2 && to - 2 > i) i = to - 3;
  }
  return false;
}

template <class Visit>
bool any_block(const Blocks& blocks, size_t depth, uintptr_t at, const Visit& visit) {
  if (depth == blocks.loops.size()) return visit(at);
  for (int64_t i = 0; i < blocks.loops[depth].size; ++i) {
    const auto step = static_cast<uintptr_t>(i * blocks.loops[depth].stride);
    if (any_block(blocks, depth + 1, at + step, visit)) return true;
  }
  return false;
}

}  // namespace

bool overlap(const Access& a, const Access& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  Blocks few(a);
  Blocks many(b);
  if (!few.nested || !many.nested) return true;
  if (few.count() > many.count()) std::swap(few, many);
  if (few.count() > kMostBlocks) return true;
  return any_block(few, 0, few.first, [&](uintptr_t at) {
    const int64_t low = static_cast<int64_t>(at) - static_cast<int64_t>(many.first);
    return touches(many, 0, low, low + few.block);
  });
}

}  // namespace vnpu::race
