#include "device/pace.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "device/failure.h"
#include "device/traffic.h"

namespace vnpu {
namespace {

// Longer ones are a mistake in the unit.
constexpr int64_t kMostMicroseconds = 10'000'000;
constexpr std::string_view kPerMebibyte = "/MiB";  // that the task writes

[[noreturn]] void refuse(const std::string& text, std::string_view part) {
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: VNPU_PACE='" + text + "' is not valid at '" + std::string(part) +
                    "'. Expected NAME=MICROSECONDS,... with at most 10000000 each, such as "
                    "aclnnMatmul=300,all_reduce=500/MiB.");
}

}  // namespace

Pace::Pace(const std::string& text) {
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    const size_t equals = part.find('=');
    if (equals == 0 || equals == std::string_view::npos) refuse(text, part);
    const std::string_view number = part.substr(equals + 1);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(number.begin(), number.end(), value);
    const std::string_view unit = number.substr(static_cast<size_t>(end - number.begin()));
    if (error != std::errc() || value < 0 || value > kMostMicroseconds ||
        (!unit.empty() && unit != kPerMebibyte)) {
      refuse(text, part);
    }
    durations_.push_back({std::string(part.substr(0, equals)), value, !unit.empty()});
    if (!unit.empty()) Touched::keeps_accesses = true;
  }
  // The longest beginning first.
  std::stable_sort(durations_.begin(), durations_.end(), [](const auto& a, const auto& b) {
    return a.beginning.size() > b.beginning.size();
  });
}

const Pace& Pace::instance() {
  static const Pace pace = [] {
    const char* text = std::getenv("VNPU_PACE");
    return Pace(text == nullptr ? "" : text);
  }();
  return pace;
}

void Pace::keep(const Task& task) const {
  const std::string_view name = task.name;
  for (const Duration& each : durations_) {
    if (!name.starts_with(each.beginning)) continue;
    int64_t nanoseconds = each.microseconds * 1000;
    if (each.per_mebibyte) {
      const double mebibytes = static_cast<double>(traffic_of(task).written) / (1 << 20);
      nanoseconds = static_cast<int64_t>(static_cast<double>(nanoseconds) * mebibytes);
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
    return;
  }
}

}  // namespace vnpu
