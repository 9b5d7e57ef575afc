#include "timing/timeline_file.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "device/failure.h"

namespace vnpu::timing {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kCompute: return "operator";
    case Kind::kCommunication: return "collective";
    case Kind::kCopy: return "copy";
    case Kind::kEvent: return "event";
  }
  return "other";
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return json + "\"";
}

// Microseconds, as the format wants them, without losing picoseconds.
std::string microseconds(Time time) {
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%06lld", static_cast<long long>(time / 1'000'000),
                static_cast<long long>(time % 1'000'000));
  return text;
}

}  // namespace

TimelineFile::TimelineFile(std::string path, std::string machine)
    : path_(std::move(path)), machine_(std::move(machine)), labels_{""} {}

void TimelineFile::add(const Span& span) { spans_.push_back(span); }

void TimelineFile::add_use(int device, Time now, const Shares& use) {
  if (!uses_.empty() && uses_.back().device == device && uses_.back().now == now) {
    uses_.back().shares = use;  // nothing lasted in between
  } else {
    uses_.push_back({device, now, use});
  }
}

void TimelineFile::clear() {
  spans_.clear();
  uses_.clear();
  written_ = 0;
}

void TimelineFile::name_stream(int device, int stream, const std::string& name) {
  names_[{device, stream}] = name;
}

uint32_t TimelineFile::label(const std::string& text) {
  const auto found = std::find(labels_.begin(), labels_.end(), text);
  if (found != labels_.end()) return static_cast<uint32_t>(found - labels_.begin());
  labels_.push_back(text);
  return static_cast<uint32_t>(labels_.size() - 1);
}

void TimelineFile::write() {
  if (spans_.size() == written_) return;
  written_ = spans_.size();
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path_.c_str(), "w"),
                                                             &std::fclose);
  if (file == nullptr) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: VNPU_TIMELINE: cannot write " + path_ +
                      ". Name a directory that exists and can be written.");
  }
  std::FILE* const out = file.get();
  for (const Span& span : spans_) names_.emplace(std::pair(span.device, span.stream), "stream");
  std::fputs("[", out);
  const char* comma = "\n";
  const auto metadata = [&](int device, int stream, const char* what, const char* key,
                            const std::string& value) {
    std::fprintf(out, R"(%s{"ph":"M","pid":%d,"tid":%d,"name":"%s","args":{"%s":%s}})", comma,
                 device, stream, what, key, quoted(value).c_str());
    comma = ",\n";
  };
  int last_device = -1;
  for (const auto& [place, name] : names_) {
    const auto& [device, stream] = place;
    if (device != last_device) {
      metadata(device, 0, "process_name", "name", "device " + std::to_string(device));
      metadata(device, 0, "process_labels", "labels", "modelled, no NPU: " + machine_);
      last_device = device;
    }
    metadata(
        device, stream, "thread_name", "name",
        name + " (device " + std::to_string(device) + ", stream " + std::to_string(stream) + ")");
  }
  std::array<bool, kResources> used = {};
  for (const Use& use : uses_) {
    for (size_t r = 0; r < kResources; ++r) used[r] |= use.shares[r] != 0;
  }
  for (const Span& span : spans_) {
    const Plan& plan = *span.plan;
    std::fprintf(out,
                 R"(,%s{"ph":"X","pid":%d,"tid":%d,"ts":%s,"dur":%s,"cat":"%s","name":"%s",)"
                 R"("args":{"launched":%s,"alone":%s,"bytes":%llu)",
                 "\n", span.device, span.stream, microseconds(span.begin).c_str(),
                 microseconds(span.end - span.begin).c_str(), name_of(plan.kind), plan.name,
                 microseconds(span.launched).c_str(), microseconds(plan.alone()).c_str(),
                 static_cast<unsigned long long>(plan.bytes));
    if (span.waited != 0) {
      std::fprintf(out, R"(,"waited for ranks":%s)", microseconds(span.waited).c_str());
    }
    if (span.label != 0) std::fprintf(out, R"(,"label":%s)", quoted(labels_[span.label]).c_str());
    std::fputs("}}", out);
    if (span.record == 0) continue;
    const bool waits = span.waits;
    std::fprintf(out,
                 R"(,%s{"ph":"%s","pid":%d,"tid":%d,"ts":%s,"cat":"event","name":"event",)"
                 R"("id":"%d.%llu"})",
                 "\n", waits ? R"(f","bp":"e)" : "s", span.device, span.stream,
                 microseconds(waits ? span.end : span.begin).c_str(), span.device,
                 static_cast<unsigned long long>(span.record));
  }
  for (const Use& use : uses_) {
    for (size_t r = 0; r < kResources; ++r) {
      if (!used[r]) continue;
      const uint64_t permille = (use.shares[r] * 1000 + kWhole / 2) / kWhole;
      std::fprintf(out, R"(,%s{"ph":"C","pid":%d,"ts":%s,"name":"%s","args":{"%%":%llu.%llu}})",
                   "\n", use.device, microseconds(use.now).c_str(),
                   timing::name_of(static_cast<Resource>(r)),
                   static_cast<unsigned long long>(permille / 10),
                   static_cast<unsigned long long>(permille % 10));
    }
  }
  std::fputs("\n]\n", out);
}

}  // namespace vnpu::timing
