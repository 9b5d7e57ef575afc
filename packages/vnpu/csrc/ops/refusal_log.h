#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>

namespace vnpu::ops {

// Counts operator calls checked against CANN's documents, and records refused calls and operators
// without rules, for all processes that name one directory in VNPU_REFUSALS. The directory holds
// `SOC.calls`, a counter of eight bytes that the processes share, and two files with a JSON object
// per line: `refused.jsonl` (soc, process, message, site, the innermost lines of Python) and
// `without_rules.jsonl` (operator, site; once for each process and site). So a process need not
// write anything when it ends or is killed.
class RefusalLog {
 public:
  // Null if VNPU_REFUSALS is not set.
  static RefusalLog* instance();

  void add_call() { calls_->fetch_add(1, std::memory_order_relaxed); }
  void add_refusal(const std::string& message);
  void add_call_without_rules(const std::string& name);

 private:
  explicit RefusalLog(const std::string& directory);

  std::atomic<uint64_t>* calls_;  // mapped
  int refused_, without_rules_;   // files
  std::string soc_;
  std::mutex mutex_;
  std::unordered_set<std::string> written_;  // lines of without_rules_
};

}  // namespace vnpu::ops
