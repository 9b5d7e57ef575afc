#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "trace/activities.h"

namespace vnpu::trace {

// The tasks of this process's devices from start to stop, in the layout of a directory of CANN's
// profiler:
//   PROF_NUMBER_TIME_LETTERS/host/start_info         which time of day the host's clock began with
//   PROF_NUMBER_TIME_LETTERS/device_N/data/tasks.jsonl   one task on each line, when it has ended
//   PROF_NUMBER_TIME_LETTERS/host/data/marks.jsonl   what the program marked, one on each line
// The lines are vnpu's own format, which `msprof` of vnpu's toolkit exports to CANN's files
// (vllm_davinci.vnpu.msprof). Times are nanoseconds since 1970, by the raw monotonic clock from the
// start of the process on: that is how torch_npu times its own events.
class DeviceProfile {
 public:
  // Creates the directory below `directory` and begins. Throws Failure(kInvalidArgument) if it
  // cannot be written. One at a time.
  DeviceProfile(const std::string& directory, const std::vector<uint32_t>& devices);
  // Ends, and writes the tasks that have ended until now.
  ~DeviceProfile();

  // A mark that the program sets: a range, or an instant with equal begin and end.
  struct Mark {
    std::string message;
    int thread;
    int64_t begin;
    int64_t end;
  };
  static int64_t now();
  // Writes a mark into the running profile, if any.
  static void add(const Mark& mark);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<std::FILE, Close>;

  static void write_current();
  void write();
  static void put(std::FILE* file, const Activity& activity);

  static std::mutex mutex;  // one writer at a time; guards `current`
  static DeviceProfile* current;

  std::map<int, File> files_;  // by device
  File marks_;
};

}  // namespace vnpu::trace
