#include "device/core_limits.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "device/capability.h"
#include "device/failure.h"
#include "device/stream.h"
#include "device/system.h"

namespace vnpu {
namespace {

// So that launches look no further where nobody has set one.
std::atomic<bool> is_any_set{false};

thread_local std::shared_ptr<Stream> used;

uint32_t cores_of_chip(CoreKind kind) {
  const Capability& chip = capability();
  return kind == CoreKind::kCube ? chip.cube_cores : chip.vector_cores;
}

const char* name_of(CoreKind kind) { return kind == CoreKind::kCube ? "cube" : "vector"; }

}  // namespace

void CoreLimit::set(CoreKind kind, uint32_t cores) {
  const uint32_t most = cores_of_chip(kind);
  if (cores > most) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a limit of " + std::to_string(cores) + " " + name_of(kind) +
                      " cores: this chip has " + std::to_string(most) + ". Choose at most those.");
  }
  cores_[static_cast<size_t>(kind)] = cores;
  is_any_set = true;
}

void CoreLimit::reset() {
  for (auto& cores : cores_) cores = kNone;
}

std::optional<uint32_t> CoreLimit::of(CoreKind kind) const {
  const int64_t cores = cores_[static_cast<size_t>(kind)];
  return cores == kNone ? std::nullopt : std::optional(static_cast<uint32_t>(cores));
}

namespace core_limits {

CoreLimit& of_process(int device) {
  static std::mutex mutex;
  static auto* const limits = new std::map<int, CoreLimit>();
  std::lock_guard lock(mutex);
  return (*limits)[device];
}

uint32_t of_process(int device, CoreKind kind) {
  return of_process(device).of(kind).value_or(cores_of_chip(kind));
}

uint32_t of_stream(const Stream& stream, CoreKind kind) {
  const auto own = stream.cores.of(kind);
  return own ? *own : of_process(stream.device, kind);
}

void use_in_thread(std::shared_ptr<Stream> stream) { used = std::move(stream); }

const std::shared_ptr<Stream>& used_in_thread() { return used; }

uint32_t of_thread(int device, CoreKind kind) {
  if (used != nullptr) {
    if (const auto own = used->cores.of(kind)) return *own;
  }
  return of_process(device, kind);
}

std::optional<Cores> of_launch() {
  if (!is_any_set) return std::nullopt;
  const int device = System::instance().require_current_device();
  Cores cores;
  for (const CoreKind kind : {CoreKind::kCube, CoreKind::kVector}) {
    cores.of(kind) = of_thread(device, kind);
    if (cores.of(kind) == 0) {
      throw Failure(FailureKind::kTilingRefused,
                    std::string("no ") + name_of(kind) +
                        " core is left to this thread's operators: a limit of 0 was set for its "
                        "stream or its device. Set at least 1.");
    }
  }
  if (cores.cube == cores_of_chip(CoreKind::kCube) &&
      cores.vector == cores_of_chip(CoreKind::kVector)) {
    return std::nullopt;
  }
  return cores;
}

}  // namespace core_limits
}  // namespace vnpu
