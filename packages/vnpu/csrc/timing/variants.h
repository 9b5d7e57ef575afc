#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "timing/model.h"

namespace vnpu::timing {

// Models the same program on other machines at the same time [VNPU_TIMING_VARIANTS:
// NAME:FIGURE=INTEGER;...|NAME:..., the differences from VNPU_TIMING's machine], to find out how
// much its times depend on assumed figures. Each variant is a model beside the process's own, whose
// times alone the program sees.
class Variants final : public Observer {
 public:
  // Null if VNPU_TIMING_VARIANTS is not set, or no time is modelled.
  static Variants* instance();
  // Throws Failure(kInvalidArgument) for a text that is not as above.
  Variants(std::string_view figures, std::string_view variants);

  Needs needs() const override { return {.accesses = true, .work = true}; }
  void on_launch(const Stream& stream, const Task& task, const std::string& call_site) override;
  void on_record(const Stream& stream, const Event& event) override;
  void on_wait(const Stream& stream, const Event& event, const std::string& call_site) override;
  void on_stream_waited(const Stream& stream) override;
  void on_device_waited(const int& device) override;
  void on_event_waited(const Event& event) override;
  void place_group(const std::string& name, const std::vector<int64_t>& ranks);
  void prefetch(const Stream& stream, const void* address, size_t bytes);

  void pass_host_step(int64_t requests, bool beside_device);

  // Models by name, in the stated order. The first call creates them.
  std::vector<std::pair<std::string, Model::Report>> reports(int device);

 private:
  bool begun_ = false;
  std::vector<std::pair<std::string, std::unique_ptr<Model>>> all_;
};

}  // namespace vnpu::timing
