#include "host_faults/planned_calls.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <string>
#include <utility>

#include "device/fault_plan.h"

namespace vnpu::host_faults {
namespace {

using faults::Action;
using faults::Kind;
using faults::Plan;
using faults::Rule;

constexpr const char* kNames[kCalls] = {"malloc", "open",      "write",
                                        "fsync",  "monotonic", "realtime"};
constexpr mode_t kMode = 0644;

// Calls by this library itself never fail.
thread_local bool is_inside __attribute__((tls_model("initial-exec"))) = false;
std::atomic<int> rank{-1};

bool is_clock(Call call) { return call >= Call::kMonotonic; }

class PlannedCalls {
 public:
  explicit PlannedCalls(Plan plan) : plan_(std::move(plan)), reached_(plan_.rules.size()) {
    open_counts();
  }

  // For a forked child, which counts from 1 again.
  void begin_anew() {
    for (std::atomic<uint64_t>& each : reached_) each = 0;
    open_counts();
  }

  int next(Call call) {
    const auto number = static_cast<size_t>(call);
    if (counts_ != nullptr) {
      counts_->rank = rank;
      __atomic_fetch_add(&counts_->calls[number], 1, __ATOMIC_RELAXED);
    }
    const Rule* found = nullptr;
    for (size_t i = 0; i < plan_.rules.size(); ++i) {
      const Rule& rule = plan_.rules[i];
      if (rule.kind != (is_clock(call) ? Kind::kClock : Kind::kHost)) continue;
      if (!rule.name.empty() && rule.name != kNames[number]) continue;
      if (rule.rank.has_value() && *rule.rank != rank) continue;
      const uint64_t reached = reached_[i].fetch_add(1) + 1;
      if (reached == rule.first || (rule.is_sticky && reached > rule.first)) {
        if (found == nullptr) found = &rule;
        if (reached == rule.first) announce(rule, call);
      }
    }
    return found == nullptr ? 0 : perform(found->action, call);
  }

  int64_t jumped_ns(Call call) const { return jumped_ns_[static_cast<size_t>(call)]; }

 private:
  void open_counts() {
    counts_ = nullptr;
    if (plan_.count_directory.empty()) return;
    const std::string path = plan_.count_directory + "/" + std::to_string(::getpid()) + ".host";
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, kMode);
    if (file < 0) return;  // the device's library reports the reason
    void* mapped = MAP_FAILED;
    if (::ftruncate(file, sizeof(HostCounts)) == 0) {
      mapped = ::mmap(nullptr, sizeof(HostCounts), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    ::close(file);
    if (mapped != MAP_FAILED) counts_ = static_cast<HostCounts*>(mapped);
  }

  // Reports that the fault happens, or begins, so that a run without it can be recognized.
  static void announce(const Rule& rule, Call call) {
    const std::string line = "vnpu: VNPU_FAULTS: " + rule.text + " at " +
                             faults::name_of(rule.kind) + ":" + kNames[static_cast<size_t>(call)] +
                             " in rank " + std::to_string(rank) + " (pid " +
                             std::to_string(::getpid()) + ")\n";
    ::syscall(SYS_write, STDERR_FILENO, line.data(), line.size());
  }

  int perform(const Action& action, Call call) {
    using What = Action::What;
    switch (action.what) {
      case What::kErrno: return action.code;
      case What::kOom: return ENOMEM;
      case What::kDie: ::raise(SIGKILL); break;
      case What::kStop: ::raise(SIGSTOP); break;
      case What::kDelay: {
        const auto milliseconds = action.delay.count();
        timespec time{milliseconds / 1000, milliseconds % 1000 * 1'000'000};
        ::nanosleep(&time, nullptr);
        break;
      }
      case What::kJump:
        jumped_ns_[static_cast<size_t>(call)] +=
            std::chrono::nanoseconds(action.delay) / std::chrono::nanoseconds(1);
        break;
      default: break;  // the plan's reader refuses the others
    }
    return 0;
  }

  const Plan plan_;
  std::deque<std::atomic<uint64_t>> reached_;  // by rule
  HostCounts* counts_ = nullptr;
  std::atomic<int64_t> jumped_ns_[kCalls] = {};
};

std::atomic<PlannedCalls*> planned{nullptr};

void begin_in_child() {
  is_inside = true;
  planned.load()->begin_anew();
  is_inside = false;
}

// Never freed: other threads continue while the process ends.
__attribute__((constructor)) void read_plan() {
  const char* const text = std::getenv("VNPU_FAULTS");
  if (text == nullptr || *text == '\0') return;
  if (const char* const own = std::getenv("RANK"); own != nullptr) {
    int number = -1;
    std::from_chars(own, own + std::strlen(own), number);
    rank = number;
  }
  is_inside = true;
  try {
    planned = new PlannedCalls(Plan::parse(text));
    ::pthread_atfork(nullptr, nullptr, begin_in_child);
  } catch (const std::exception&) {
    // The device's library refuses the plan, in words that Python passes on.
  }
  is_inside = false;
}

}  // namespace

int reach(Call call) {
  PlannedCalls* const own = planned.load(std::memory_order_acquire);
  if (own == nullptr || is_inside) return 0;
  const int before = errno;
  is_inside = true;
  const int code = own->next(call);
  is_inside = false;
  errno = before;
  return code;
}

int64_t jumped_ns(Call call) {
  const PlannedCalls* const own = planned.load(std::memory_order_acquire);
  return own == nullptr ? 0 : own->jumped_ns(call);
}

}  // namespace vnpu::host_faults

// The device's library calls this to set the process's rank, if the environment does not. Its
// presence tells that library that rules for the host can apply.
extern "C" __attribute__((visibility("default"))) void vnpu_host_faults_set_rank(int number) {
  int none = -1;
  vnpu::host_faults::rank.compare_exchange_strong(none, number);
}
