#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "device/cores.h"

namespace vnpu {

class Stream;

// A stream's limit takes precedence over the process's limit on its device, and that over the
// chip's number of cores. An operator uses the limits of the thread that called its first phase.
namespace core_limits {

CoreLimit& of_process(int device);
uint32_t of_process(int device, CoreKind kind);
uint32_t of_stream(const Stream& stream, CoreKind kind);

// The stream whose limits hold in this thread; null where none is in use.
void use_in_thread(std::shared_ptr<Stream> stream);
const std::shared_ptr<Stream>& used_in_thread();
uint32_t of_thread(int device, CoreKind kind);

// Limits for an operator that this thread prepares; nothing if all cores may be used. Throws
// kTilingRefused if no core of a kind is left.
std::optional<Cores> of_launch();

}  // namespace core_limits
}  // namespace vnpu
