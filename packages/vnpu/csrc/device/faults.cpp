#include "device/faults.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "device/failure.h"

namespace vnpu::faults {
namespace {

using What = Action::What;

constexpr mode_t kMode = 0644;
std::atomic<int> own_device{-1};

Counts* counts_in(const std::string& directory) {
  const std::string path = directory + "/" + std::to_string(::getpid()) + ".points";
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, kMode);
  void* mapped = MAP_FAILED;
  if (file >= 0 && ::ftruncate(file, sizeof(Counts)) == 0) {
    mapped = ::mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (mapped == MAP_FAILED) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: VNPU_FAULTS=count:" + directory + ": " +
                                                     std::strerror(errno) +
                                                     ". Expected a directory that can be written.");
  }
  ::close(file);
  return new (mapped) Counts;
}

// The plan of this process, with what has been reached.
class Injector {
 public:
  explicit Injector(Plan plan) : plan_(std::move(plan)), reached_(plan_.rules.size()) {
    if (!plan_.count_directory.empty()) counts_ = counts_in(plan_.count_directory);
    const char* const text = std::getenv("RANK");
    // If RANK is not a number, the device's own rank stays: it is another program's variable.
    if (text != nullptr) std::from_chars(text, text + std::strlen(text), rank_);
  }

  int rank() const { return rank_ >= 0 ? rank_ : own_device.load(std::memory_order_relaxed); }

  void count(Kind kind) {
    if (counts_ == nullptr) return;
    counts_->rank = rank();
    const uint64_t number = counts_->points.fetch_add(1);
    if (number < Counts::kListed) counts_->kinds[number] = static_cast<uint8_t>(kind);
  }

  // Counts the call for each rule that matches it; returns the first rule that is due.
  const Rule* next(Kind kind, const char* name, Phase phase) {
    const Rule* found = nullptr;
    for (size_t i = 0; i < plan_.rules.size(); ++i) {
      const Rule& rule = plan_.rules[i];
      if (rule.kind != Kind::kPoint && rule.kind != kind) continue;
      if (rule.phase != Phase::kAny && rule.phase != phase) continue;
      if (!rule.name.empty() && rule.name != name) continue;
      if (rule.rank.has_value() && *rule.rank != rank()) continue;
      const uint64_t number = reached_[i].fetch_add(1) + 1;
      if (number == rule.first || (rule.is_sticky && number > rule.first)) {
        if (found == nullptr) found = &rule;
      }
    }
    return found;
  }

 private:
  const Plan plan_;
  std::deque<std::atomic<uint64_t>> reached_;  // by rule
  int rank_ = -1;                              // of the environment
  Counts* counts_ = nullptr;
};

// Calls of the C library are replaced before a program starts, or not at all.
using SetHostRank = void(int);
SetHostRank* host_faults() {
  return reinterpret_cast<SetHostRank*>(::dlsym(RTLD_DEFAULT, "vnpu_host_faults_set_rank"));
}

Plan plan_of(const char* text) {
  Plan plan = Plan::parse(text);
  if (plan.is_of_host() && host_faults() == nullptr) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: VNPU_FAULTS='" + std::string(text) +
                      "': rules for the host's own calls and clocks hold in programs that were "
                      "started by `vnpu run --faults PLAN -- COMMAND`, which this one was not.");
  }
  return plan;
}

// Null where there is no plan.
Injector* injector() {
  static Injector* const made = []() -> Injector* {
    const char* const text = std::getenv("VNPU_FAULTS");
    if (text == nullptr || *text == '\0') {
      are_possible = false;
      return nullptr;
    }
    return new Injector(plan_of(text));
  }();
  return made;
}

// Reports the fault, so that a run without it can be recognized.
std::string announce(const Rule& rule, Kind kind, const char* name, Phase phase) {
  std::string where = name_of(kind);
  if (*name != '\0') where += std::string(":") + name;
  if (phase != Phase::kAny) where += std::string(".") + name_of(phase);
  const std::string text = "vnpu: VNPU_FAULTS: " + rule.text + " at " + where + " in rank " +
                           std::to_string(injector()->rank()) + " (pid " +
                           std::to_string(::getpid()) + ")";
  const std::string line = text + "\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  return text;
}

}  // namespace

std::atomic<bool> are_possible{true};

Outcome perform(const Action& action, Kind kind, const std::string& text) {
  switch (action.what) {
    case What::kCode: throw Failure(static_cast<FailureKind>(action.code), text);
    case What::kOom:
      if (kind == Kind::kCollective) throw std::bad_alloc();
      throw Failure(FailureKind::kOutOfMemory, text + ": out of memory");
    case What::kThrow: throw Failure(FailureKind::kInternal, text);
    case What::kDie: ::raise(SIGKILL); break;
    case What::kStop: ::raise(SIGSTOP); break;
    case What::kDelay: std::this_thread::sleep_for(action.delay); break;
    case What::kGone: return Outcome::kGone;
    case What::kTruncated: return Outcome::kTruncated;
    case What::kHang:  // of a task only
    case What::kJump:  // these are of csrc/host_faults
    case What::kErrno: break;
  }
  return Outcome::kNone;
}

Outcome reach_planned(Kind kind, const char* name, Phase phase) {
  Injector* const own = injector();
  if (own == nullptr) return Outcome::kNone;
  own->count(kind);
  const Rule* const rule = own->next(kind, name, phase);
  if (rule == nullptr || rule->action.is_async) return Outcome::kNone;
  return perform(rule->action, kind, announce(*rule, kind, name, phase));
}

std::optional<PlannedLaunch> next_launch(const char* name) {
  Injector* const own = injector();
  if (own == nullptr) return std::nullopt;
  own->count(Kind::kLaunch);
  const Rule* const rule = own->next(Kind::kLaunch, name, Phase::kAny);
  if (rule == nullptr) return std::nullopt;
  return PlannedLaunch{rule->action, announce(*rule, Kind::kLaunch, name, Phase::kAny)};
}

void set_device(int physical_device) {
  int none = -1;
  own_device.compare_exchange_strong(none, physical_device);
  if (!are_possible.load(std::memory_order_relaxed)) return;
  if (SetHostRank* const set = host_faults(); set != nullptr) set(physical_device);
}

void open_plan() { injector(); }

}  // namespace vnpu::faults
