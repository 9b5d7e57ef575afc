#include "ops/refusal_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "device/call_site.h"
#include "device/configuration.h"
#include "device/failure.h"
#include "device/shared_file.h"

namespace vnpu::ops {
namespace {

constexpr char kVariable[] = "VNPU_REFUSALS";

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
      ::open((directory + name).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) shared_file::refuse_directory(kVariable, directory);
  return file;
}

// A single write, so that lines of several processes do not mix.
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
    const char* const directory = std::getenv(kVariable);
    const bool is_wanted = directory != nullptr && *directory != '\0';
    return is_wanted ? new RefusalLog(directory) : nullptr;  // until the process ends
  }();
  return log;
}

RefusalLog::RefusalLog(const std::string& directory) {
  const Configuration& configuration = Configuration::instance();
  soc_ = (configuration.is_reference ? "reference:" : "") + configuration.soc_name;
  calls_ = static_cast<std::atomic<uint64_t>*>(
      shared_file::mapped_in(kVariable, directory, soc_ + ".calls", sizeof(*calls_)));
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
