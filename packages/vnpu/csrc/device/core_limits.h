#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

namespace vnpu {

class Stream;

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

 private:
  static constexpr int64_t kNone = -1;
  std::array<std::atomic<int64_t>, 2> cores_ = {kNone, kNone};
};

// A stream's limit goes before the process's on its device, and that before what the chip has. An
// operator keeps what held for the thread that called its first phase.
namespace core_limits {

CoreLimit& of_process(int device);
uint32_t of_process(int device, CoreKind kind);
uint32_t of_stream(const Stream& stream, CoreKind kind);

// The stream whose limits hold in this thread; null where none is in use.
void use_in_thread(std::shared_ptr<Stream> stream);
const std::shared_ptr<Stream>& used_in_thread();
uint32_t of_thread(int device, CoreKind kind);

// For an operator that this thread prepares; nothing where all cores are free. Throws
// kTilingRefused where none is left of a kind.
std::optional<Cores> of_launch();

}  // namespace core_limits
}  // namespace vnpu
