#include "device/configuration.h"

#include <cerrno>
#include <cstdlib>
#include <optional>

#include "device/failure.h"

namespace vnpu {
namespace {

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
  if (unit == "KiB") return number << 10;
  if (unit == "MiB") return number << 20;
  if (unit == "GiB") return number << 30;
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
    if (v->rfind("Ascend", 0) != 0) refuse("VNPU_SOC", *v, "a SoC name such as Ascend910B3");
    c.soc_name = *v;
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
    if (*end != '\0' || !(c.wait_limit_seconds > 0)) {
      refuse("VNPU_WAIT_LIMIT", *v, "a positive number of seconds");
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

const Configuration& Configuration::instance() {
  static const Configuration configuration = of_environment();
  return configuration;
}

}  // namespace vnpu
