#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <mutex>
#include <set>
#include <string>

#include "collective/carrier.h"

namespace vnpu {

// torch's gloo, by a process group that Python has made and registered under a name.
class GlooCarrier final : public Carrier {
 public:
  // torch's registry does not own the group: the caller keeps it alive until this object does.
  explicit GlooCarrier(const std::string& name);

  void send(uint32_t to, Channel channel, const void* data, size_t bytes,
            std::chrono::milliseconds limit) override;
  void receive(uint32_t from, Channel channel, void* data, size_t bytes,
               std::chrono::milliseconds limit) override;
  void close() override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  // Begins a message unless the carrier is closed, and waits for its end.
  template <class Begin>
  void complete(const Begin& begin, std::chrono::milliseconds limit);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;
  bool is_closed_ = false;
  std::set<c10d::Work*> under_way_;
};

}  // namespace vnpu
