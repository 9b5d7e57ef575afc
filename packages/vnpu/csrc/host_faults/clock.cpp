// Replaces the C library's functions that read clocks, or wait until a time read from them.

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#include <cstdint>
#include <optional>

#include "host_faults/planned_calls.h"

using vnpu::host_faults::Call;
using vnpu::host_faults::jumped_ns;
using vnpu::host_faults::reach;

#define REPLACES extern "C" __attribute__((visibility("default")))
#define REPLACED(name) \
  static const auto replaced = reinterpret_cast<decltype(&::name)>(::dlsym(RTLD_NEXT, #name))

namespace {

constexpr int64_t kNsPerS = 1'000'000'000;

// None for clocks of processors and threads, which measure no wait.
std::optional<Call> call_of(clockid_t clock) {
  switch (clock) {
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_RAW:
    case CLOCK_MONOTONIC_COARSE:
    case CLOCK_BOOTTIME: return Call::kMonotonic;
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE: return Call::kRealtime;
    default: return std::nullopt;
  }
}

timespec later(const timespec& time, int64_t by_ns) {
  const int64_t all = static_cast<int64_t>(time.tv_sec) * kNsPerS + time.tv_nsec + by_ns;
  const int64_t seconds = all >= 0 ? all / kNsPerS : (all - kNsPerS + 1) / kNsPerS;
  return {static_cast<time_t>(seconds), static_cast<long>(all - seconds * kNsPerS)};
}

// The caller's deadline is a time of a clock that has jumped. The kernel's clock has not, so the
// jump is subtracted.
timespec of_kernel(clockid_t clock, const timespec* time) {
  const std::optional<Call> call = call_of(clock);
  const timespec result = later(*time, call.has_value() ? -jumped_ns(*call) : 0);
  return result.tv_sec < 0 ? timespec{} : result;
}

// A condition variable does not tell which clock it uses. A deadline larger than any uptime belongs
// to the clock that counts from 1970.
clockid_t clock_of(const timespec* time) {
  return time->tv_sec < kNsPerS ? CLOCK_MONOTONIC : CLOCK_REALTIME;
}

}  // namespace

REPLACES int clock_gettime(clockid_t clock, timespec* time) noexcept {
  REPLACED(clock_gettime);
  const int status = replaced(clock, time);
  const std::optional<Call> call = call_of(clock);
  if (status != 0 || !call.has_value()) return status;
  reach(*call);
  *time = later(*time, jumped_ns(*call));
  return status;
}

REPLACES int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  REPLACED(clock_nanosleep);
  if ((flags & TIMER_ABSTIME) == 0) return replaced(clock, flags, time, left);
  const timespec until = of_kernel(clock, time);
  return replaced(clock, flags, &until, left);
}

REPLACES int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                    clockid_t clock, const timespec* time) {
  REPLACED(pthread_cond_clockwait);
  const timespec until = of_kernel(clock, time);
  return replaced(condition, mutex, clock, &until);
}

REPLACES int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                    const timespec* time) {
  REPLACED(pthread_cond_timedwait);
  const timespec until = of_kernel(clock_of(time), time);
  return replaced(condition, mutex, &until);
}

REPLACES int sem_clockwait(sem_t* semaphore, clockid_t clock, const timespec* time) {
  REPLACED(sem_clockwait);
  const timespec until = of_kernel(clock, time);
  return replaced(semaphore, clock, &until);
}

REPLACES int sem_timedwait(sem_t* semaphore, const timespec* time) {
  REPLACED(sem_timedwait);
  const timespec until = of_kernel(CLOCK_REALTIME, time);
  return replaced(semaphore, &until);
}
