#include "trace/device_profile.h"

#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <random>

#include "collective/element.h"
#include "device/failure.h"

namespace vnpu::trace {
namespace {

constexpr std::array kKinds = {Activity::Kind::kOperator, Activity::Kind::kCollective,
                               Activity::Kind::kCopy,     Activity::Kind::kRecord,
                               Activity::Kind::kWait,     Activity::Kind::kOther};

int64_t read_clock(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// From the raw monotonic clock to the time of day, whole microseconds; the same all the time.
int64_t offset() {
  static const int64_t difference =
      (read_clock(CLOCK_REALTIME) - read_clock(CLOCK_MONOTONIC_RAW)) / 1000 * 1000;
  return difference;
}

int64_t now_ns() { return read_clock(CLOCK_MONOTONIC_RAW) + offset(); }

Activities& activities() {
  static Activities& made = Activities::make(&now_ns);
  return made;
}

const char* name_of(Activity::Kind kind) {
  switch (kind) {
    case Activity::Kind::kOperator: return "operator";
    case Activity::Kind::kCollective: return "collective";
    case Activity::Kind::kCopy: return "copy";
    case Activity::Kind::kRecord: return "record";
    case Activity::Kind::kWait: return "wait";
    case Activity::Kind::kOther:
    case Activity::Kind::kLaunch: break;
  }
  return "other";
}

// PROF_000001_20261123005300123_ABCDEFGHIJKLMNOP, as CANN names them.
std::string directory_name() {
  static std::atomic<int> count{0};
  const int64_t now = now_ns();
  const time_t seconds = now / 1'000'000'000;
  tm parts{};
  ::localtime_r(&seconds, &parts);
  char text[64];
  std::snprintf(text, sizeof(text), "PROF_%06d_%04d%02d%02d%02d%02d%02d%03d_", ++count,
                parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min,
                parts.tm_sec, static_cast<int>(now / 1'000'000 % 1000));
  std::random_device random;
  std::string name = text;
  for (int i = 0; i < 16; ++i) name += static_cast<char>('A' + random() % 26);
  return name;
}

[[noreturn]] void refuse(const std::filesystem::path& path, const char* reason) {
  throw Failure(FailureKind::kInvalidArgument, "vnpu: a profile cannot be written to " +
                                                   path.string() + ": " + reason +
                                                   ". Name a directory that can be written.");
}

void make_directory(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) refuse(path, error.message().c_str());
}

std::string json_escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    char code[8];
    std::snprintf(code, sizeof(code), "\\u%04x", static_cast<unsigned char>(c));
    const bool is_plain = static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\';
    escaped += is_plain ? std::string(1, c) : code;
  }
  return escaped;
}

std::FILE* open(const std::filesystem::path& path) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) refuse(path, std::strerror(errno));
  return file;
}

}  // namespace

std::mutex DeviceProfile::mutex;
DeviceProfile* DeviceProfile::current = nullptr;

DeviceProfile::DeviceProfile(const std::string& directory, const std::vector<uint32_t>& devices) {
  const std::filesystem::path root = std::filesystem::path(directory) / directory_name();
  make_directory(root / "host" / "data");
  const int64_t begin = now_ns() / 1000 * 1000;
  const File start(open(root / "host" / "start_info"));
  std::fprintf(start.get(), R"({"collectionTimeBegin":"%lld","clockMonotonicRaw":"%lld"})",
               static_cast<long long>(begin / 1000), static_cast<long long>(begin - offset()));
  for (const uint32_t device : devices) {
    const std::filesystem::path data = root / ("device_" + std::to_string(device)) / "data";
    make_directory(data);
    files_[static_cast<int>(device)] = File(open(data / "tasks.jsonl"));
  }
  marks_ = File(open(root / "host" / "data" / "marks.jsonl"));
  activities().take();  // drops activities that ended after an earlier profile
  {
    const std::lock_guard lock(mutex);
    current = this;
  }
  activities().on_full(&write_current);
  for (const Activity::Kind kind : kKinds) activities().collect(kind, true);
}

DeviceProfile::~DeviceProfile() {
  for (const Activity::Kind kind : kKinds) activities().collect(kind, false);
  activities().on_full(nullptr);
  const std::lock_guard lock(mutex);
  write();
  current = nullptr;
}

void DeviceProfile::write_current() {
  const std::lock_guard lock(mutex);
  if (current != nullptr) current->write();
}

int64_t DeviceProfile::now() { return now_ns(); }

void DeviceProfile::add(const Mark& mark) {
  const std::lock_guard lock(mutex);
  if (current == nullptr) return;
  std::fprintf(current->marks_.get(),
               R"({"message":"%s","process":%d,"thread":%d,"begin_ns":%lld,"end_ns":%lld})"
               "\n",
               json_escaped(mark.message).c_str(), ::getpid(), mark.thread,
               static_cast<long long>(mark.begin), static_cast<long long>(mark.end));
}

void DeviceProfile::write() {
  for (const Activity& activity : activities().take()) {
    const auto file = files_.find(activity.device);
    if (file != files_.end()) put(file->second.get(), activity);
  }
}

void DeviceProfile::put(std::FILE* file, const Activity& activity) {
  // No name has a character that JSON would escape: literals of this library, and names of groups
  // that torch_npu makes of letters, digits and signs.
  std::fprintf(file,
               R"({"kind":"%s","name":"%s","stream":%d,"launch":%llu,"launched_ns":%lld,)"
               R"("process":%d,"thread":%d,"begin_ns":%lld,"end_ns":%lld)",
               name_of(activity.kind), activity.name, activity.stream,
               static_cast<unsigned long long>(activity.launch),
               static_cast<long long>(activity.launched), ::getpid(), activity.thread,
               static_cast<long long>(activity.begin), static_cast<long long>(activity.end));
  if (activity.kind == Activity::Kind::kCollective) {
    std::fprintf(file, R"(,"group":"%s","count":%llu,"dtype":"%s")", activity.group,
                 static_cast<unsigned long long>(activity.count),
                 activity.type.has_value() ? vnpu::name_of(*activity.type) : "");
  }
  std::fputs("}\n", file);
}

}  // namespace vnpu::trace
