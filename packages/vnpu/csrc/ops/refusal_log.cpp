#include "ops/refusal_log.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "device/call_site.h"
#include "device/configuration.h"
#include "device/failure.h"

namespace vnpu::ops {
namespace {

constexpr mode_t kMode = 0644;

[[noreturn]] void refuse_directory(const std::string& directory) {
  throw Failure(FailureKind::kInvalidArgument, "vnpu: VNPU_REFUSALS='" + directory +
                                                   "' is not valid: " + std::strerror(errno) +
                                                   ". Expected a directory that can be written.");
}

std::string json_text(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return result + "\"";
}

int opened(const std::string& directory, const char* name) {
  const int file =
      ::open((directory + name).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, kMode);
  if (file < 0) refuse_directory(directory);
  return file;
}

// One write, which appends whole lines where several processes write.
void append(int file, const std::string& line) {
  if (::write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: VNPU_REFUSALS: a line was not written: ") +
                      std::strerror(errno) + ". Free room in its directory.");
  }
}

}  // namespace

RefusalLog* RefusalLog::instance() {
  static RefusalLog* const log = [] {
    const char* const directory = std::getenv("VNPU_REFUSALS");
    const bool is_wanted = directory != nullptr && *directory != '\0';
    return is_wanted ? new RefusalLog(directory) : nullptr;  // until the process ends
  }();
  return log;
}

RefusalLog::RefusalLog(const std::string& directory) {
  const Configuration& configuration = Configuration::instance();
  soc_ = (configuration.is_reference ? "reference:" : "") + configuration.soc_name;
  const int counts =
      ::open((directory + "/" + soc_ + ".calls").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kMode);
  if (counts < 0 || ::ftruncate(counts, sizeof(*calls_)) != 0) refuse_directory(directory);
  void* const mapped =
      ::mmap(nullptr, sizeof(*calls_), PROT_READ | PROT_WRITE, MAP_SHARED, counts, 0);
  if (mapped == MAP_FAILED) refuse_directory(directory);
  ::close(counts);
  calls_ = static_cast<std::atomic<uint64_t>*>(mapped);
  refused_ = opened(directory, "/refused.jsonl");
  without_rules_ = opened(directory, "/without_rules.jsonl");
}

void RefusalLog::add_refusal(const std::string& message) {
  append(refused_, "{\"soc\": " + json_text(soc_) + ", \"process\": " + std::to_string(::getpid()) +
                       ", \"message\": " + json_text(message) +
                       ", \"site\": " + json_text(python_call_site()) + "}\n");
}

void RefusalLog::add_call_without_rules(const std::string& name) {
  const std::string site = python_call_site();  // takes Python's lock, and so no other
  const std::string line =
      "{\"operator\": " + json_text(name) + ", \"site\": " + json_text(site) + "}\n";
  const std::lock_guard lock(mutex_);
  if (written_.insert(line).second) append(without_rules_, line);
}

}  // namespace vnpu::ops
