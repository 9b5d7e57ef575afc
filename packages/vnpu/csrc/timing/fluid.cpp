#include "timing/fluid.h"

namespace vnpu::timing {
namespace {

using Wide = unsigned __int128;

uint64_t divide_wide_up(Wide value, Wide divisor) {
  return static_cast<uint64_t>((value + divisor - 1) / divisor);
}

}  // namespace

const char* name_of(Resource resource) {
  switch (resource) {
    case Resource::kCube: return "cube";
    case Resource::kVector: return "vector";
    case Resource::kHbm: return "hbm";
    case Resource::kL2: return "l2";
    case Resource::kAiCpu: return "ai_cpu";
    case Resource::kCopyIn: return "copy_in";
    case Resource::kCopyOut: return "copy_out";
    case Resource::kLinks0: return "links_0";
    case Resource::kLinks1: return "links_1";
    case Resource::kLinks2: return "links_2";
  }
  return "unknown";
}

Shares shares_of(const Phase& phase) {
  Shares shares = {};
  const Time longest = phase.work();
  if (longest <= 0) return shares;
  for (size_t r = 0; r < kResources; ++r) {
    shares[r] =
        divide_wide_up(static_cast<Wide>(phase.busy[r]) * kWhole, static_cast<Wide>(longest));
  }
  return shares;
}

void speeds_of(const std::vector<const Shares*>& tasks, std::vector<uint64_t>& speeds) {
  speeds.assign(tasks.size(), 0);
  Shares left;
  left.fill(kWhole);
  std::vector<size_t> rising(tasks.size());
  for (size_t i = 0; i < tasks.size(); ++i) rising[i] = i;
  uint64_t level = 0;
  while (!rising.empty()) {
    std::array<Wide, kResources> wanted = {};
    for (const size_t i : rising) {
      for (size_t r = 0; r < kResources; ++r) wanted[r] += (*tasks[i])[r];
    }
    uint64_t rise = kWhole - level;
    std::array<bool, kResources> used_up = {};
    for (size_t r = 0; r < kResources; ++r) {
      if (wanted[r] == 0) continue;
      const Wide most = static_cast<Wide>(left[r]) * kWhole / wanted[r];
      if (most > rise) continue;
      if (most < rise) used_up.fill(false);
      rise = static_cast<uint64_t>(most);
      used_up[r] = true;
    }
    level += rise;
    for (size_t r = 0; r < kResources; ++r) {
      const uint64_t taken = divide_wide_up(static_cast<Wide>(rise) * wanted[r], kWhole);
      left[r] -= std::min(left[r], taken);
    }
    for (const size_t i : rising) speeds[i] = level;
    if (level == kWhole) return;
    std::erase_if(rising, [&](size_t i) {
      for (size_t r = 0; r < kResources; ++r) {
        if (used_up[r] && (*tasks[i])[r] != 0) return true;
      }
      return false;
    });
  }
}

}  // namespace vnpu::timing
