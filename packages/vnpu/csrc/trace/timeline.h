#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace vnpu::trace {

enum class Category { kOperator, kCollective, kCopy, kRecord, kWait, kOther };

// One task on its stream. Times are nanoseconds of the timeline's clock.
struct Span {
  const char* task;  // a literal
  Category category = Category::kOther;
  int stream = 0;
  int64_t launched = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t waited = 0;  // of end - begin: blocked on an event, or on other ranks
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t event = 0;    // of kRecord and kWait
  uint64_t version = 0;  // which record of the event
  std::string label;     // the program's own description of what it launched
  bool failed = false;
};

// Writes spans to a file that Perfetto and chrome://tracing read (Trace Event Format, an array with
// one event on each line). It has no clock: callers pass spans and name their clock. A thread of
// its own writes a few times per second, so that a process that is killed loses little; the array's
// closing bracket, which the format makes optional, comes when the process ends.
class Timeline {
 public:
  // path:  created when there is something to write; the directory must exist
  // clock: what the times are, for the reader
  Timeline(std::string path, std::string clock);
  ~Timeline() = delete;  // lives as long as the process

  void add(Span span);
  // Sets the track's name: a role such as "compute". The newest counts.
  void name_stream(int device, int stream, const std::string& name);
  // Writes the remaining spans and the end. Later spans are dropped.
  void close();

 private:
  void write_regularly();
  // Writes the collected spans, one caller at a time; lock: of mutex_, released while writing.
  void write(std::unique_lock<std::mutex>& lock);
  bool put_all(const std::vector<Span>& spans, const std::map<int, std::string>& names);
  void put(const Span& span);
  void put_metadata(const char* what, int stream, const char* key, const std::string& value);
  void begin_line();

  const std::string path_;
  const std::string clock_;
  const int process_;
  std::mutex mutex_;
  std::condition_variable regularly_;
  std::condition_variable written_;
  std::vector<Span> spans_;
  std::map<int, std::string> names_;  // of streams, not yet written
  bool closed_ = false;
  bool is_writing_ = false;
  std::FILE* file_ = nullptr;  // the writer's, as all below
  std::string process_name_;
  bool first_ = true;
};

}  // namespace vnpu::trace
