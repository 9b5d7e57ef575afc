#include "device/configuration.h"

#include <cerrno>
#include <cstdlib>
#include <optional>

#include "device/checked_sizes.h"
#include "device/failure.h"

namespace vnpu {
namespace {

constexpr double kLongestWait = 1e9;  // seconds: in milliseconds far from what a clock can count

[[noreturn]] void refuse(const char* name, const std::string& value, const char* expected) {
  throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: ") + name + "='" + value +
                                                   "' is not valid. Expected " + expected + ".");
}

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

uint64_t parse_unsigned(const char* name, const std::string& value, const char* expected) {
  errno = 0;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(value.c_str(), &end, 10);
  if (errno != 0 || end == value.c_str() || *end != '\0' || value[0] == '-') {
    refuse(name, value, expected);
  }
  return number;
}

size_t parse_bytes(const char* name, const std::string& value) {
  constexpr const char* kExpected = "a size such as 64GiB, 512MiB or a number of bytes";
  size_t digits = 0;
  while (digits < value.size() && value[digits] >= '0' && value[digits] <= '9') ++digits;
  if (digits == 0) refuse(name, value, kExpected);
  const uint64_t number = parse_unsigned(name, value.substr(0, digits), kExpected);
  const std::string unit = value.substr(digits);
  if (unit.empty()) return number;
  for (const auto& [text, factor] : {std::pair{"KiB", uint64_t{1} << 10},
                                     {"MiB", uint64_t{1} << 20},
                                     {"GiB", uint64_t{1} << 30}}) {
    if (unit == text) return checked_multiply(number, factor, name);
  }
  refuse(name, value, kExpected);
}

}  // namespace

Configuration Configuration::of_environment() {
  Configuration c;
  if (const auto v = environment("VNPU_DEVICES")) {
    const uint64_t n = parse_unsigned("VNPU_DEVICES", *v, "a number of devices from 1 to 64");
    if (n < 1 || n > 64) refuse("VNPU_DEVICES", *v, "a number of devices from 1 to 64");
    c.device_count = static_cast<uint32_t>(n);
  }
  if (const auto v = environment("VNPU_SOC")) {
    constexpr const char* kExpected =
        "a SoC name such as Ascend910B3, or reference or reference:NAME for one that takes "
        "operands "
        "of any dtype and size";
    std::string name = *v;
    constexpr const char kReference[] = "reference";
    if (name.rfind(kReference, 0) == 0) {
      c.is_reference = true;
      name.erase(0, sizeof(kReference) - 1);
      if (name.empty()) {
        name = c.soc_name;
      } else if (name[0] == ':') {
        name.erase(0, 1);
      }
    }
    if (name.rfind("Ascend", 0) != 0) refuse("VNPU_SOC", *v, kExpected);
    c.soc_name = name;
  }
  c.chip = &chip_of(c.soc_name);
  c.cann = c.chip->cann;
  c.memory_bytes = c.chip->memory_bytes;
  if (const auto v = environment("VNPU_CANN")) {
    if (*v == "8.3") {
      c.cann = CannRelease::k8_3;
    } else if (*v == "8.5") {
      c.cann = CannRelease::k8_5;
    } else if (*v == "9.0") {
      c.cann = CannRelease::k9_0;
    } else {
      refuse("VNPU_CANN", *v, "8.3, 8.5 or 9.0");
    }
  }
  if (const auto v = environment("VNPU_STRICT")) {
    if (*v != "0" && *v != "1") refuse("VNPU_STRICT", *v, "0 or 1");
    c.strict = *v == "1";
  }
  if (const auto v = environment("VNPU_MEMORY")) {
    c.memory_bytes = parse_bytes("VNPU_MEMORY", *v);
    if (c.memory_bytes < (size_t{16} << 20) || c.memory_bytes > (size_t{512} << 30)) {
      refuse("VNPU_MEMORY", *v, "a size from 16MiB to 512GiB");
    }
  }
  if (const auto v = environment("VNPU_SCHEDULE")) {
    if (*v == "eager") {
      c.schedule = SchedulePolicy::kEager;
    } else if (*v == "threads") {
      c.schedule = SchedulePolicy::kThreads;
    } else if (v->rfind("fuzz:", 0) == 0) {
      c.schedule = SchedulePolicy::kFuzz;
      if (v->find_first_not_of("0123456789", 5) != std::string::npos || v->size() == 5) {
        refuse("VNPU_SCHEDULE", *v, "eager, threads or fuzz:SEED");
      }
      c.seed = parse_unsigned("VNPU_SCHEDULE", v->substr(5), "eager, threads or fuzz:SEED");
    } else {
      refuse("VNPU_SCHEDULE", *v, "eager, threads or fuzz:SEED");
    }
  }
  if (const auto v = environment("VNPU_WAIT_LIMIT")) {
    char* end = nullptr;
    c.wait_limit_seconds = std::strtod(v->c_str(), &end);
    // The comparisons are false for no number, too.
    if (*end != '\0' || !(c.wait_limit_seconds > 0 && c.wait_limit_seconds <= kLongestWait)) {
      refuse("VNPU_WAIT_LIMIT", *v, "a number of seconds above 0, at most 1e9");
    }
  }
  if (const auto v = environment("VNPU_COMPUTE")) {
    if (*v != "0" && *v != "1") refuse("VNPU_COMPUTE", *v, "0 or 1");
    c.compute = *v == "1";
  }
  if (const auto v = environment("VNPU_RACES")) {
    if (*v == "report") {
      c.races = RaceMode::kReport;
    } else if (*v == "raise") {
      c.races = RaceMode::kRaise;
    } else if (*v != "off") {
      refuse("VNPU_RACES", *v, "off, report or raise");
    }
  }
  return c;
}

const char* Configuration::cann_version() const {
  switch (cann) {
    case CannRelease::k8_3: return "8.3.0";
    case CannRelease::k8_5: return "8.5.0";
    case CannRelease::k9_0: return "9.0.0";
  }
  return "";
}

const Configuration& Configuration::instance() {
  static const Configuration configuration = of_environment();
  return configuration;
}

}  // namespace vnpu
