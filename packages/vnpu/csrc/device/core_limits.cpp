#include "device/core_limits.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "device/failure.h"
#include "device/stream.h"
#include "device/system.h"

namespace vnpu {
namespace {

thread_local std::shared_ptr<Stream> used;

}  // namespace

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
  if (!CoreLimit::is_any_set()) return std::nullopt;
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
