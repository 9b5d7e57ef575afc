#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "device/cores.h"

namespace vnpu {

class Stream;

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
