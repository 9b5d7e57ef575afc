#pragma once

// The headers with which operators' files begin, compiled once: parsing ATen's headers takes longer
// than compiling most of these files. None of our own headers: with a compiler cache, a precompiled
// header that is there already takes part in making its successor, which then misses their changes.

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
