#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

namespace vnpu {

enum class CoreKind : uint8_t { kCube, kVector };

// Cores that operators may take, by kind.
struct Cores {
  uint32_t cube = 0;
  uint32_t vector = 0;
  uint32_t& of(CoreKind kind) { return kind == CoreKind::kCube ? cube : vector; }
  uint32_t of(CoreKind kind) const { return kind == CoreKind::kCube ? cube : vector; }
};

// Limits of one stream, or of this process on one device, that may be set for each kind.
class CoreLimit {
 public:
  // Throws kInvalidArgument where the chip has fewer.
  void set(CoreKind kind, uint32_t cores);
  void reset();
  std::optional<uint32_t> of(CoreKind kind) const;
  // True if any limit was set; otherwise launches skip the lookup.
  static bool is_any_set();

 private:
  static constexpr int64_t kNone = -1;
  std::array<std::atomic<int64_t>, 2> cores_ = {kNone, kNone};
};

// Cores of that kind that the chip has.
uint32_t cores_of_chip(CoreKind kind);
const char* name_of(CoreKind kind);

}  // namespace vnpu
