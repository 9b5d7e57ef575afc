#include "timing/hardware_queues.h"

#include <algorithm>
#include <tuple>

namespace vnpu::timing {

std::optional<Time> HardwareQueues::take(int device, int stream) {
  if (most_ == 0) return 0;
  std::vector<Queue>& queues = queues_[device];
  const auto own = std::find_if(queues.begin(), queues.end(),
                                [stream](const Queue& queue) { return queue.stream == stream; });
  if (own != queues.end()) {
    own->at_work = true;
    return 0;
  }
  if (queues.size() < most_) {
    queues.push_back({stream, true, 0});
    return 0;
  }
  const auto oldest =
      std::min_element(queues.begin(), queues.end(), [](const Queue& a, const Queue& b) {
        return std::tuple(a.at_work, a.ended, a.stream) < std::tuple(b.at_work, b.ended, b.stream);
      });
  if (oldest->at_work) return std::nullopt;
  *oldest = {stream, true, 0};
  return change_;
}

void HardwareQueues::release(int device, int stream, Time now) {
  if (most_ == 0) return;
  for (Queue& queue : queues_[device]) {
    if (queue.stream != stream) continue;
    queue.at_work = false;
    queue.ended = now;
  }
}

}  // namespace vnpu::timing
