#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace vnpu::ops {

// How many calls of operators were held against CANN's documents and which of them were refused, of
// all processes that name one directory in VNPU_REFUSALS. It holds `SOC.calls`, a number of eight
// bytes that the processes share, and `refused.jsonl`, one object a line: soc, process, message,
// site, the innermost lines of Python.
// Nothing is left to write when a process ends, or is killed.
class RefusalLog {
 public:
  // Null where none is wanted.
  static RefusalLog* instance();

  void add_call() { calls_->fetch_add(1, std::memory_order_relaxed); }
  void add_refusal(const std::string& message);

 private:
  explicit RefusalLog(const std::string& directory);

  std::atomic<uint64_t>* calls_;  // mapped
  int refused_;                   // file
  std::string soc_;
};

}  // namespace vnpu::ops
