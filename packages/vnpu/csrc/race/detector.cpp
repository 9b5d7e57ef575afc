#include "race/detector.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "device/call_site.h"
#include "device/configuration.h"
#include "device/failure.h"
#include "device/memory.h"
#include "device/pinned_memory.h"
#include "device/stream.h"
#include "device/system.h"
#include "race/overlap.h"

namespace vnpu::race {
namespace {

constexpr uintptr_t kBucketBits = 20;  // uses are kept by MiB of address space

constexpr const char* kWritten = "changed by the host, as seen at";
constexpr const char* kFreed = "freed by the host at";

Detector* detector = nullptr;

bool same_layout(const Access::Layout& a, const Access::Layout& b) {
  return a.dims == b.dims && a.item == b.item && a.first == b.first &&
         std::equal(a.sizes, a.sizes + a.dims, b.sizes) &&
         std::equal(a.strides, a.strides + a.dims, b.strides);
}

}  // namespace

Detector* Detector::instance() {
  static const bool made = [] {
    const RaceMode mode = Configuration::instance().races;
    if (mode == RaceMode::kOff) return false;
    detector = new Detector(mode == RaceMode::kRaise);  // reports until the process ends
    std::atexit([] { detector->at_exit(); });
    return true;
  }();
  (void)made;
  return detector;
}

Detector::Detector(bool raises) : raises_(raises) {}
Detector::~Detector() = default;

void Detector::at_exit() {
  // In a process that was forked while another thread held the lock, nothing is checked.
  const std::unique_lock lock(System::instance().executor().mutex(), std::try_to_lock);
  if (lock.owns_lock()) {
    try {
      report(host_memory_.take_disturbed({0, ~uintptr_t{0}}), kWritten, "\n      the exit");
    } catch (const Failure& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
    }
  }
  std::fprintf(stderr, "vnpu: %llu race%s found.\n", static_cast<unsigned long long>(found_),
               found_ == 1 ? "" : "s");
}

Detector::Scope& Detector::scope_of(const Stream& stream) {
  return stream.capture == nullptr ? process_ : captures_[stream.capture.get()];
}

void Detector::on_launch(const Stream& stream, const Task& task, const std::string& call_site) {
  Scope& scope = scope_of(stream);
  VectorClock& now = scope.streams[stream.id];
  now.join(scope.host);
  now.set(static_cast<size_t>(stream.id), ++scope.launched[stream.id]);
  const auto launch = std::make_shared<const Launch>(
      Launch{task.name, stream.id, scope.launched[stream.id], call_site, now});
  if (task.tells_accesses) untold_[&task] = launch;
  for (const Access& access : task.touched.accesses()) check(scope, now, Use{access, launch});
  if (const Access* const workspace = task.touched.workspace()) {
    check(scope, now, Use{*workspace, launch});
  }
  if (stream.capture != nullptr) return;
  for (const Access& access : task.touched.accesses()) {
    if (PinnedMemory::instance().contains(reinterpret_cast<const void*>(access.begin))) {
      use_host_memory(access, launch);
    }
  }
}

void Detector::on_accessed(const Task& task, const std::vector<Access>& accesses) {
  const auto found = untold_.find(&task);
  if (found == untold_.end()) return;
  const LaunchPtr launch = found->second;
  untold_.erase(found);
  for (const Access& access : accesses) check(process_, launch->known, Use{access, launch});
}

void Detector::use_host_memory(const Access& access, const LaunchPtr& launch) {
  const HostMemory::Range range{access.begin, access.end};
  const auto disturbed = host_memory_.take_disturbed(range);
  if (access.write) {
    host_memory_.written(range, launch);
  } else {
    host_memory_.read(range, launch);
  }
  report(disturbed, kWritten, launch->call_site);
}

void Detector::check(Scope& scope, const VectorClock& now, const Use& use) {
  const uintptr_t first = use.access.begin >> kBucketBits;
  const uintptr_t last = (use.access.end - 1) >> kBucketBits;
  for (uintptr_t bucket = first; bucket <= last; ++bucket) {
    std::vector<Use>& uses = scope.uses[bucket];
    std::erase_if(uses, [&](const Use& earlier) {
      if (earlier.launch == use.launch) return false;
      const bool is_before =
          earlier.launch->number <= now.of(static_cast<size_t>(earlier.launch->stream));
      const bool ordered =
          is_before ||
          use.launch->number <= earlier.launch->known.of(static_cast<size_t>(use.launch->stream));
      if (!ordered && (earlier.access.write || use.access.write) &&
          overlap(earlier.access, use.access)) {
        report(earlier, use);
      }
      // A write that covers the earlier use replaces it: a later launch that conflicts with the
      // earlier use conflicts with this write as well, or is ordered after both.
      return untold_.empty() && is_before && use.access.write && use.access.layout.dims == 0 &&
             use.access.begin <= earlier.access.begin && use.access.end >= earlier.access.end;
    });
    // A newer use of the same kind and elements by the same stream replaces the older one.
    std::erase_if(uses, [&](const Use& earlier) {
      return untold_.empty() && earlier.launch->stream == use.launch->stream &&
             earlier.launch->number < use.launch->number &&
             earlier.access.write == use.access.write && earlier.access.begin == use.access.begin &&
             earlier.access.end == use.access.end &&
             same_layout(earlier.access.layout, use.access.layout);
    });
    uses.push_back(use);
  }
}

void Detector::on_record(const Stream& stream, const Event& event) {
  Scope& scope = scope_of(stream);
  VectorClock& now = scope.streams[stream.id];
  now.join(scope.host);
  scope.events[event.id] = now;
}

void Detector::on_wait(const Stream& stream, const Event& event, const std::string& call_site) {
  Scope& scope = scope_of(stream);
  const auto recorded = scope.events.find(event.id);
  if (recorded != scope.events.end()) {
    scope.streams[stream.id].join(recorded->second);
    return;
  }
  if (event.newest() > 0) return;  // recorded outside of this capture: ordered before it
  say("wait " + call_site,
      "vnpu: a stream waits for an event that was never recorded, so it waits for nothing.\n"
      "  stream " +
          std::to_string(stream.id) + " at" + call_site +
          "\n  Record the event on the producing stream before this wait.");
}

VectorClock& Detector::seen_by_this_thread() {
  return is_program_thread() ? process_.host : library_threads_[std::this_thread::get_id()];
}

void Detector::on_stream_synchronized(const Stream& stream, const std::string& call_site) {
  Scope& scope = scope_of(stream);
  if (!is_program_thread()) {
    if (&scope == &process_) seen_by_this_thread().join(scope.streams[stream.id]);
    return;
  }
  scope.host.join(scope.streams[stream.id]);
  report(host_memory_.take_finished(process_.host), kWritten, call_site);
}

void Detector::on_event_synchronized(const Event& event, const std::string& call_site) {
  const auto recorded = process_.events.find(event.id);
  if (recorded == process_.events.end()) return;
  seen_by_this_thread().join(recorded->second);
  if (!is_program_thread()) return;
  report(host_memory_.take_finished(process_.host), kWritten, call_site);
}

void Detector::on_device_free(const void* begin, const size_t& bytes, const char* function,
                              const std::string& call_site) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t end = first + bytes;
  VectorClock seen = process_.host;
  seen.join(seen_by_this_thread());
  std::vector<Use> unfinished;
  for (auto& [bucket, uses] : process_.uses) {
    if (bucket < first >> kBucketBits || bucket > (end - 1) >> kBucketBits) continue;
    std::erase_if(uses, [&](const Use& use) {
      if (use.access.begin >= end || use.access.end <= first) return false;
      if (use.launch->number > seen.of(static_cast<size_t>(use.launch->stream))) {
        unfinished.push_back(use);
      }
      return true;  // the next owner of these addresses has other memory
    });
  }
  for (const Use& use : unfinished) report_freed(use, function, call_site);
}

void Detector::on_host_free(const void* begin, size_t bytes, const std::string& call_site) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  report(host_memory_.take({first, first + bytes}), kFreed, call_site);
}

void Detector::on_deadlock(const std::string& text) {
  ++found_;
  std::fprintf(stderr, "%s\n", text.c_str());
}

void Detector::on_capture_begin(const Graph& graph) { captures_[&graph]; }

void Detector::on_capture_end(const Graph& graph) { captures_.erase(&graph); }

void Detector::report(const Use& earlier, const Use& later) {
  const auto side = [](const Use& use) {
    std::string text = std::string(use.access.write ? "write" : "read") + " by ";
    if (use.access.line != nullptr) {
      const uint32_t* const program = use.access.program;
      text += "program (" + std::to_string(program[0]) + ", " + std::to_string(program[1]) + ", " +
              std::to_string(program[2]) + "), " + use.access.line + ", of ";
    }
    return text + use.launch->describe();
  };
  const uintptr_t begin = std::max(earlier.access.begin, later.access.begin);
  const uintptr_t end = std::min(earlier.access.end, later.access.end);
  const std::string text =
      "vnpu: race on " + std::to_string(end - begin) + " bytes at " +
      Memory::instance().describe(reinterpret_cast<void*>(begin)) + "\n    " + side(earlier) +
      "\n    " + side(later) + "\n  Nothing orders the two. Record an event on stream " +
      std::to_string(earlier.launch->stream) + " after the first and let stream " +
      std::to_string(later.launch->stream) +
      " wait for it before the second; if the memory was reused, keep the tensor or call "
      "record_stream on it.";
  say(std::string(earlier.launch->task) + earlier.launch->call_site + later.launch->task +
          later.launch->call_site,
      text);
}

void Detector::report_freed(const Use& use, const char* function, const std::string& call_site) {
  say(use.launch->task + use.launch->call_site + function + call_site,
      "vnpu: race on " + std::to_string(use.access.end - use.access.begin) + " bytes at " +
          Memory::instance().describe(reinterpret_cast<void*>(use.access.begin)) + "\n    " +
          (use.access.write ? "write" : "read") + " by " + use.launch->describe() + "\n    " +
          kFreed + (call_site.empty() ? "\n      (no Python frame)" : call_site) + "\n  " +
          function +
          " does not wait: a chip may give the memory to another owner while the launch still "
          "uses it. Wait for the launch first, as by aclrtSynchronizeStream of stream " +
          std::to_string(use.launch->stream) + ".");
}

void Detector::report(const std::vector<HostMemory::Read>& reads, const char* what,
                      const std::string& call_site) {
  for (const HostMemory::Read& read : reads) {
    say(read.launch->task + read.launch->call_site + what,
        "vnpu: race on " + std::to_string(read.range.end - read.range.begin) +
            " bytes of pinned host memory\n    read by " + read.launch->describe() + "\n    " +
            what + (call_site.empty() ? "\n      (no Python frame)" : call_site) +
            "\n  Until the host has waited for that launch (event.synchronize(), or a query that "
            "says it is complete) it must leave the memory alone. Wait before the write, or use "
            "other memory for each step.");
  }
}

void Detector::say(const std::string& key, const std::string& text) {
  if (!said_.insert(key).second) return;  // once per pair of call sites
  ++found_;
  if (raises_) throw Failure(FailureKind::kRace, text);
  std::fprintf(stderr, "%s\n", text.c_str());
}

}  // namespace vnpu::race
