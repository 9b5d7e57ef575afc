#pragma once

#include <cstddef>
#include <cstring>
#include <string>

#include "abi/tdt_statuses.h"

namespace vnpu::abi {

// Reads a value of `bytes` from a program, whose type has that many or more.
template <class T>
void read_parameter(const void* from, size_t bytes, T& value, const char* name) {
  require_parameter(from != nullptr && bytes <= sizeof(T),
                    std::string(name) + " is a value of " + std::to_string(sizeof(T)) +
                        " bytes, not of " + std::to_string(bytes) + ".");
  std::memcpy(&value, from, bytes);
}

// Writes a value to where a program has `room` for it; its size.
template <class T>
void write_parameter(const T& value, void* to, size_t room, size_t* bytes, const char* name) {
  require_parameter(to != nullptr && bytes != nullptr && room >= sizeof(T),
                    std::string(name) + " takes " + std::to_string(sizeof(T)) +
                        " bytes and a place for their number; there are " + std::to_string(room) +
                        ".");
  std::memcpy(to, &value, sizeof(T));
  *bytes = sizeof(T);
}

}  // namespace vnpu::abi
