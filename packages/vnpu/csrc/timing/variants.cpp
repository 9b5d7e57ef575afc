#include "timing/variants.h"

#include <algorithm>
#include <cstdlib>

#include "device/failure.h"
#include "device/stream.h"

namespace vnpu::timing {
namespace {

std::vector<std::string_view> parts_of(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::string_view name_of_figure(std::string_view part) { return part.substr(0, part.find('=')); }

// The machine's figures, with the values that `changed` states.
std::string changed_figures(std::string_view figures,
                            const std::vector<std::string_view>& changed) {
  std::string text;
  for (const std::string_view each : parts_of(figures, ';')) {
    const auto found = std::find_if(changed.begin(), changed.end(), [each](std::string_view part) {
      return name_of_figure(part) == name_of_figure(each);
    });
    text += std::string(found == changed.end() ? each : *found) + ";";
  }
  // A figure that the machine does not have is refused with its name.
  for (const std::string_view each : changed) {
    const auto known = parts_of(figures, ';');
    const bool is_known = std::any_of(known.begin(), known.end(), [each](std::string_view part) {
      return name_of_figure(part) == name_of_figure(each);
    });
    if (!is_known) text += std::string(each) + ";";
  }
  return text;
}

}  // namespace

Variants* Variants::instance() {
  static Variants* const variants = [] {
    const char* text = std::getenv("VNPU_TIMING_VARIANTS");
    const char* figures = std::getenv("VNPU_TIMING");
    const bool wanted = text != nullptr && *text != '\0' && Model::is_wanted();
    return wanted ? new Variants(figures, text) : nullptr;
  }();
  return variants;
}

Variants::Variants(std::string_view figures, std::string_view variants) {
  for (const std::string_view each : parts_of(variants, '|')) {
    const size_t colon = each.find(':');
    if (colon == std::string_view::npos || colon == 0) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: VNPU_TIMING_VARIANTS has '" + std::string(each) +
                        "' where NAME:FIGURE=INTEGER;... is expected. Let `vllm-davinci dry-run "
                        "--sensitivity` write the variable.");
    }
    const std::string text = changed_figures(figures, parts_of(each.substr(colon + 1), ';'));
    all_.emplace_back(each.substr(0, colon), std::make_unique<Model>(Machine(text), nullptr));
  }
}

void Variants::on_launch(const Stream& stream, const Task& task, const std::string& call_site) {
  if (!begun_ && stream.capture == nullptr) return;
  for (auto& [name, model] : all_) model->on_launch(stream, task, call_site);
}

void Variants::on_record(const Stream& stream, const Event& event) {
  if (!begun_ && stream.capture == nullptr) return;
  for (auto& [name, model] : all_) model->on_record(stream, event);
}

void Variants::on_wait(const Stream& stream, const Event& event, const std::string& call_site) {
  if (!begun_ && stream.capture == nullptr) return;
  for (auto& [name, model] : all_) model->on_wait(stream, event, call_site);
}

void Variants::on_stream_waited(const Stream& stream) {
  if (!begun_) return;
  for (auto& [name, model] : all_) model->on_stream_waited(stream);
}

void Variants::on_device_waited(const int& device) {
  if (!begun_) return;
  for (auto& [name, model] : all_) model->on_device_waited(device);
}

void Variants::on_event_waited(const Event& event) {
  if (!begun_) return;
  for (auto& [name, model] : all_) model->on_event_waited(event);
}

void Variants::place_group(const std::string& name, const std::vector<int64_t>& ranks) {
  for (auto& [variant, model] : all_) model->place_group(name, ranks);
}

void Variants::prefetch(const Stream& stream, const void* address, size_t bytes) {
  if (!begun_ && stream.capture == nullptr) return;
  for (auto& [name, model] : all_) model->prefetch(stream, address, bytes);
}

void Variants::pass_host_step(int64_t requests, bool beside_device) {
  if (!begun_) return;
  for (auto& [name, model] : all_) model->pass_host_step(requests, beside_device);
}

std::vector<std::pair<std::string, Model::Report>> Variants::reports(int device) {
  begun_ = true;
  std::vector<std::pair<std::string, Model::Report>> found;
  found.reserve(all_.size());
  for (auto& [name, model] : all_) found.emplace_back(name, model->report(device));
  return found;
}

}  // namespace vnpu::timing
