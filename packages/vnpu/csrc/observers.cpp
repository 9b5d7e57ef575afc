// The observers of this process's devices. The device itself knows none of them; this file connects
// them.

#include "device/observer.h"
#include "race/detector.h"
#include "timing/model.h"
#include "timing/variants.h"
#include "trace/recorder.h"

namespace vnpu {

void add_observers(Observers& observers) {
  // The detector first: a launch that it refuses must not be traced.
  if (auto* detector = race::Detector::instance()) observers.add(*detector);
  // The variants before the model: the host's waits take the times of the model.
  if (auto* variants = timing::Variants::instance()) observers.add(*variants);
  if (auto* model = timing::Model::instance()) observers.add(*model);
  if (auto* recorder = trace::Recorder::instance()) observers.add(*recorder);
}

}  // namespace vnpu
