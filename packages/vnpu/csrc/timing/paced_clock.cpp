#include "timing/paced_clock.h"

#include <algorithm>
#include <cstdio>
#include <thread>

namespace vnpu::timing {
namespace {

using std::chrono::duration;
using std::chrono::steady_clock;

constexpr double kPicoseconds = 1e12;
// A wait counts as late beyond this error: a share of the modelled time since the previous wait,
// plus the usual error of a sleep.
constexpr Time kShare = 50;  // that share is 1 / kShare
constexpr Time kSleepError = 200'000'000;
// Minimum time between warnings; a warning also needs one late wait in kOneOf.
constexpr std::chrono::seconds kBetweenWarnings{10};
constexpr int64_t kOneOf = 20;

}  // namespace

PacedClock::PacedClock(double scale)
    : scale_(scale), start_(steady_clock::now()), next_warning_(start_) {}

Time PacedClock::now() const {
  const duration<double> passed = steady_clock::now() - start_;
  return static_cast<Time>(passed.count() / scale_ * kPicoseconds);
}

void PacedClock::sleep_until(Time time) {
  const Time here = now();
  note(time, here - time);
  if (here >= time) return;
  const duration<double> seconds(static_cast<double>(time) / kPicoseconds * scale_);
  std::this_thread::sleep_until(start_ +
                                std::chrono::duration_cast<steady_clock::duration>(seconds));
}

void PacedClock::note(Time time, Time late) {
  const std::lock_guard lock(mutex_);
  const Time since = std::max<Time>(time - newest_, 0);
  newest_ = std::max(newest_, time);
  ++lateness_.waits;
  if (late <= std::max(since / kShare, kSleepError)) return;
  ++lateness_.late;
  lateness_.total += late;
  lateness_.greatest = std::max(lateness_.greatest, late);
  const int64_t waits = lateness_.waits - told_.waits;
  const int64_t late_waits = lateness_.late - told_.late;
  if (late_waits * kOneOf < waits || steady_clock::now() < next_warning_) return;
  const double mean =
      static_cast<double>(lateness_.total - told_.total) / static_cast<double>(late_waits) * 1e-9;
  std::fprintf(stderr,
               "vnpu: this host is too slow for the modelled chip: %lld of the last %lld waits "
               "ended late, by %.3f modelled ms in the mean. Serving figures then hold this host's "
               "time. Use a time scale above %g.\n",
               static_cast<long long>(late_waits), static_cast<long long>(waits), mean, scale_);
  told_ = lateness_;
  next_warning_ = steady_clock::now() + kBetweenWarnings;
}

PacedClock::Lateness PacedClock::lateness() const {
  const std::lock_guard lock(mutex_);
  return lateness_;
}

}  // namespace vnpu::timing
