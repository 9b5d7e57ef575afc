#include "device/cores.h"

#include <string>

#include "device/configuration.h"
#include "device/failure.h"

namespace vnpu {
namespace {

std::atomic<bool> any_set{false};

}  // namespace

uint32_t cores_of_chip(CoreKind kind) {
  const Chip& chip = *Configuration::instance().chip;
  return kind == CoreKind::kCube ? chip.cube_cores : chip.vector_cores;
}

const char* name_of(CoreKind kind) { return kind == CoreKind::kCube ? "cube" : "vector"; }

void CoreLimit::set(CoreKind kind, uint32_t cores) {
  const uint32_t most = cores_of_chip(kind);
  if (cores > most) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: a limit of " + std::to_string(cores) + " " + name_of(kind) +
                      " cores: this chip has " + std::to_string(most) + ". Choose at most those.");
  }
  cores_[static_cast<size_t>(kind)] = cores;
  any_set = true;
}

void CoreLimit::reset() {
  for (auto& cores : cores_) cores = kNone;
}

std::optional<uint32_t> CoreLimit::of(CoreKind kind) const {
  const int64_t cores = cores_[static_cast<size_t>(kind)];
  return cores == kNone ? std::nullopt : std::optional(static_cast<uint32_t>(cores));
}

bool CoreLimit::is_any_set() { return any_set; }

}  // namespace vnpu
