#include "abi/llm_datadist/regions.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "device/failure.h"
#include "device/memory.h"
#include "device/system.h"

namespace vnpu::transfer {

namespace {

char* bytes_at(uintptr_t address) {
  return Memory::instance().backing(reinterpret_cast<char*>(address));
}

bool is_live(const Piece& piece) {
  const auto* const begin = reinterpret_cast<const void*>(piece.begin);
  const Memory& memory = Memory::instance();
  return !memory.is_device_address(begin) || memory.is_live(begin, piece.bytes);
}

}  // namespace

uint64_t bytes_of(const std::vector<Piece>& pieces) {
  uint64_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.bytes;
  return sum;
}

void* Regions::add(uintptr_t begin, size_t bytes, bool is_device) {
  const auto* const address = reinterpret_cast<const void*>(begin);
  const Memory& memory = Memory::instance();
  if (begin == 0 || bytes == 0 || begin + bytes < begin ||
      memory.is_device_address(address) != is_device) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: RegisterMem of " + std::to_string(bytes) + " bytes of " +
                      (is_device ? "a device" : "the host") + ", where there is " +
                      memory.describe(address) + ".");
  }
  if (is_device) memory.check(address, bytes, "RegisterMem");
  const std::lock_guard lock(mutex_);
  const uintptr_t handle = next_ += 16;
  live_.emplace(handle, Piece{begin, bytes});
  return reinterpret_cast<void*>(handle);
}

bool Regions::remove(void* handle) {
  const std::lock_guard lock(mutex_);
  return live_.erase(reinterpret_cast<uintptr_t>(handle)) == 1;
}

bool Regions::hold(const std::vector<Piece>& pieces) const {
  const std::lock_guard lock(mutex_);
  return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
    return is_live(piece) && std::any_of(live_.begin(), live_.end(), [&](const auto& entry) {
             const Piece& region = entry.second;
             return piece.begin >= region.begin && piece.bytes <= region.bytes &&
                    piece.begin - region.begin <= region.bytes - piece.bytes;
           });
  });
}

void gather(const std::vector<Piece>& pieces, char* into) {
  System::instance().executor().while_nothing_runs([&] {
    for (const Piece& piece : pieces) {
      std::memcpy(into, bytes_at(piece.begin), piece.bytes);
      into += piece.bytes;
    }
  });
}

void scatter(const char* from, const std::vector<Piece>& pieces) {
  System::instance().executor().while_nothing_runs([&] {
    for (const Piece& piece : pieces) {
      std::memcpy(bytes_at(piece.begin), from, piece.bytes);
      from += piece.bytes;
    }
  });
}

}  // namespace vnpu::transfer
