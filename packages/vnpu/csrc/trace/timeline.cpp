#include "trace/timeline.h"

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string_view>
#include <thread>
#include <utility>

namespace vnpu::trace {
namespace {

constexpr std::chrono::milliseconds kWriteEvery{250};
constexpr size_t kWriteAt = 4096;  // spans: sooner

const char* name_of(Category category) {
  switch (category) {
    case Category::kOperator: return "operator";
    case Category::kCollective: return "collective";
    case Category::kCopy: return "copy";
    case Category::kRecord:
    case Category::kWait: return "event";
    case Category::kOther: return "other";
  }
  return "other";
}

std::string json_string(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      json += ' ';
    } else {
      json += c;
    }
  }
  return json + "\"";
}

// Microseconds, as the format wants them, without losing nanoseconds.
std::string microseconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%lld.%03lld", static_cast<long long>(nanoseconds / 1000),
                static_cast<long long>(nanoseconds % 1000));
  return text;
}

// Current name of the process; programs change it (setproctitle).
std::string current_process_name() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text;
  std::getline(file, text, '\0');
  for (std::string word; text.size() < 300 && std::getline(file, word, '\0');) {
    if (!word.empty()) text += " " + word;
  }
  const size_t end = text.find_last_not_of(' ');
  return end == std::string::npos ? "a process" : text.substr(0, std::min<size_t>(end + 1, 300));
}

}  // namespace

Timeline::Timeline(std::string path, std::string clock)
    : path_(std::move(path)), clock_(std::move(clock)), process_(::getpid()) {
  std::thread(&Timeline::write_regularly, this).detach();
}

void Timeline::add(Span span) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  spans_.push_back(std::move(span));
  if (spans_.size() == kWriteAt) regularly_.notify_one();
}

void Timeline::name_stream(int device, int stream, const std::string& name) {
  std::lock_guard lock(mutex_);
  names_[stream] =
      name + " (device " + std::to_string(device) + ", stream " + std::to_string(stream) + ")";
}

void Timeline::close() {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  write(lock);  // after the regular writer, which may be about to open the file
  closed_ = true;
  if (file_ != nullptr) {
    std::fputs("\n]\n", file_);
    std::fflush(file_);
  }
}

void Timeline::write_regularly() {
  std::unique_lock lock(mutex_);
  while (!closed_) {
    regularly_.wait_for(lock, kWriteEvery);
    if (!closed_) write(lock);
  }
}

void Timeline::write(std::unique_lock<std::mutex>& lock) {
  written_.wait(lock, [this] { return !is_writing_; });
  if (spans_.empty() || closed_) return;
  is_writing_ = true;
  std::vector<Span> spans;
  std::map<int, std::string> names;
  spans.swap(spans_);
  names.swap(names_);
  lock.unlock();
  const bool is_written = put_all(spans, names);
  lock.lock();
  closed_ = closed_ || !is_written;
  is_writing_ = false;
  written_.notify_all();
}

bool Timeline::put_all(const std::vector<Span>& spans, const std::map<int, std::string>& names) {
  if (file_ == nullptr) file_ = std::fopen(path_.c_str(), "w");
  if (file_ == nullptr) {
    std::fprintf(stderr, "vnpu: VNPU_TRACE: cannot write %s. Name a directory that exists.\n",
                 path_.c_str());
    return false;
  }
  if (first_) {
    std::fputs("[", file_);
    put_metadata("process_labels", 0, "labels", clock_);
  }
  if (std::string name = current_process_name(); name != process_name_) {
    put_metadata("process_name", 0, "name", name);
    process_name_ = std::move(name);
  }
  for (const auto& [stream, name] : names) put_metadata("thread_name", stream, "name", name);
  for (const Span& span : spans) put(span);
  std::fflush(file_);
  return true;
}

void Timeline::begin_line() {
  std::fputs(first_ ? "\n" : ",\n", file_);
  first_ = false;
}

void Timeline::put_metadata(const char* what, int stream, const char* key,
                            const std::string& value) {
  begin_line();
  std::fprintf(file_, R"({"ph":"M","pid":%d,"tid":%d,"name":"%s","args":{"%s":%s}})", process_,
               stream, what, key, json_string(value).c_str());
}

void Timeline::put(const Span& span) {
  begin_line();
  std::fprintf(file_,
               R"({"ph":"X","pid":%d,"tid":%d,"ts":%s,"dur":%s,"cat":"%s","name":%s,"args":{)"
               R"("launched":%s,"waited":%s)",
               process_, span.stream, microseconds(span.begin).c_str(),
               microseconds(span.end - span.begin).c_str(), name_of(span.category),
               json_string(span.task).c_str(), microseconds(span.launched).c_str(),
               microseconds(span.waited).c_str());
  const bool is_event = span.category == Category::kRecord || span.category == Category::kWait;
  if (is_event) {
    std::fprintf(file_, R"(,"event":%llu,"record":%llu)",
                 static_cast<unsigned long long>(span.event),
                 static_cast<unsigned long long>(span.version));
  } else {
    std::fprintf(file_, R"(,"bytes_read":%llu,"bytes_written":%llu)",
                 static_cast<unsigned long long>(span.read_bytes),
                 static_cast<unsigned long long>(span.written_bytes));
  }
  if (!span.label.empty()) std::fprintf(file_, R"(,"label":%s)", json_string(span.label).c_str());
  if (span.failed) std::fputs(R"(,"failed":true)", file_);
  std::fputs("}}", file_);
  if (!is_event) return;
  // An arrow from the record to the wait.
  begin_line();
  std::fprintf(file_,
               R"({"ph":"%s","pid":%d,"tid":%d,"ts":%s,"cat":"event","name":"event",)"
               R"("id":"%d.%llu.%llu"})",
               span.category == Category::kRecord ? "s" : R"(f","bp":"e)", process_, span.stream,
               microseconds(span.category == Category::kRecord ? span.begin : span.end).c_str(),
               process_, static_cast<unsigned long long>(span.event),
               static_cast<unsigned long long>(span.version));
}

}  // namespace vnpu::trace
