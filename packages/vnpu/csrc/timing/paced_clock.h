#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

#include "timing/resources.h"

namespace vnpu::timing {

// The modelled clock beside this host's: `scale` seconds here for each modelled one [VNPU_PACED]. A
// wait for the device sleeps until the modelled time. Late waits, of a host slower than the
// modelled one, are counted and reported on stderr: served times then include this host's.
class PacedClock {
 public:
  explicit PacedClock(double scale);

  // The current modelled time.
  Time now() const;
  void sleep_until(Time time);

  struct Lateness {
    int64_t waits = 0;
    int64_t late = 0;  // late waits
    Time total = 0;    // modelled
    Time greatest = 0;
  };
  Lateness lateness() const;
  double scale() const { return scale_; }

 private:
  void note(Time time, Time late);

  const double scale_;
  const std::chrono::steady_clock::time_point start_;
  mutable std::mutex mutex_;
  Lateness lateness_;
  Lateness told_;  // at the newest warning
  Time newest_ = 0;
  std::chrono::steady_clock::time_point next_warning_;
};

}  // namespace vnpu::timing
