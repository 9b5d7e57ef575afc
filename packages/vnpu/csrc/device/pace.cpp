#include "device/pace.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "device/failure.h"

namespace vnpu {
namespace {

// Longer ones are a mistake in the unit.
constexpr int64_t kMostMicroseconds = 10'000'000;

[[noreturn]] void refuse(const std::string& text, std::string_view part) {
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: VNPU_PACE='" + text + "' is not valid at '" + std::string(part) +
                    "'. Expected NAME=MICROSECONDS,... with at most 10000000 each, such as "
                    "aclnnMatmul=300,all_reduce=500.");
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
    if (error != std::errc() || end != number.end() || value < 0 || value > kMostMicroseconds) {
      refuse(text, part);
    }
    durations_.emplace_back(part.substr(0, equals), value);
  }
  // The longest beginning first.
  std::stable_sort(durations_.begin(), durations_.end(),
                   [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
}

const Pace& Pace::instance() {
  static const Pace pace = [] {
    const char* text = std::getenv("VNPU_PACE");
    return Pace(text == nullptr ? "" : text);
  }();
  return pace;
}

void Pace::keep(const char* task_name) const {
  const std::string_view name = task_name;
  for (const auto& [beginning, duration] : durations_) {
    if (name.substr(0, beginning.size()) == beginning) {
      std::this_thread::sleep_for(duration);
      return;
    }
  }
}

}  // namespace vnpu
