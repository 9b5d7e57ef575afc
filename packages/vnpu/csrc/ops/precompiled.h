#pragma once

// The headers with which operators' files begin, compiled once: parsing ATen's headers takes longer
// than compiling most of these files. Our own headers are left out: with a compiler cache, their
// changes would not reach the next precompiled header.

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
