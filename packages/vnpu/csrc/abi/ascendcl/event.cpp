// Events: records, waits, timing.

#include "abi/ascendcl/declarations.h"
#include "device/faults.h"
#include "device/system.h"
#include "interface/handles.h"
#include "timing/model.h"

using namespace vnpu;
using abi::executor;
using abi::guarded;

namespace {

// True if an event only marks time or progress: no stream waits for it, and no device counts it.
bool only_marks(uint32_t flags) {
  constexpr uint32_t kMarks = ACL_EVENT_TIME_LINE | ACL_EVENT_CAPTURE_STREAM_PROGRESS;
  return flags != 0 && (flags & ~kMarks) == 0;
}

// Source: hicann/runtime docs/zh/api_ref/07, aclrtCreateEventExWithFlag, constraints.
void check_has_waits(const Event& event, const char* what) {
  if (!Configuration::instance().strict || !only_marks(event.flags)) return;
  throw Failure(FailureKind::kNotSupported,
                std::string("vnpu: ") + what + " an event whose flags (" +
                    std::to_string(event.flags) +
                    ") only mark time or progress; create it with ACL_EVENT_SYNC.");
}

// The shared state of an event that several processes use.
SharedRecordsPtr records_of(uint32_t flags) {
  return (flags & ACL_EVENT_IPC) != 0 ? SharedRecords::create() : nullptr;
}

// When the newest record of an event was reached, in picoseconds; on the modelled clock, if any.
int64_t time_of(const Event& event) {
  int64_t time = event.time_ns.load() * 1000;
  if (const auto* model = timing::Model::instance()) {
    executor().look([&] { time = model->time_of(event).value_or(0); });
  }
  return time;
}

}  // namespace

// The three ways to make an event differ in when it takes one of the device's: see Event::Holds.
VNPU_ACL(aclrtCreateEventExWithFlag, (aclrtEvent * event, uint32_t flags)) {
  return guarded("aclrtCreateEventExWithFlag", [&] {
    faults::reach(faults::Kind::kEvent, "create");
    const auto holds = only_marks(flags) ? Event::Holds::kNone : Event::Holds::kWhileRecorded;
    *event = abi::make_handle(std::make_shared<Event>(flags, holds, records_of(flags)));
  });
}
VNPU_ACL(aclrtCreateEventWithFlag, (aclrtEvent * event, uint32_t flags)) {
  return guarded("aclrtCreateEventWithFlag", [&] {
    faults::reach(faults::Kind::kEvent, "create");
    const auto holds = only_marks(flags) ? Event::Holds::kNone : Event::Holds::kForGood;
    auto made = std::make_shared<Event>(flags, holds, records_of(flags));
    if (holds == Event::Holds::kForGood) {
      made->hold = std::make_shared<EventHold>(System::instance().require_current_device());
    }
    *event = abi::make_handle(std::move(made));
  });
}
VNPU_ACL(aclrtCreateEvent, (aclrtEvent * event)) {
  return guarded("aclrtCreateEvent", [&] {
    faults::reach(faults::Kind::kEvent, "create");
    *event = abi::make_handle(std::make_shared<Event>(0, Event::Holds::kForGood));
  });
}
VNPU_ACL(aclrtDestroyEvent, (aclrtEvent event)) {
  return guarded("aclrtDestroyEvent", [&] {
    abi::event_of(event);
    abi::drop_event_handle(event);
  });
}
VNPU_ACL(aclrtRecordEvent, (aclrtEvent handle, aclrtStream stream)) {
  return guarded("aclrtRecordEvent",
                 [&] { executor().record(abi::stream_of(stream), abi::event_of(handle)); });
}
VNPU_ACL(aclrtStreamWaitEvent, (aclrtStream stream, aclrtEvent handle)) {
  return guarded("aclrtStreamWaitEvent", [&] {
    const EventPtr& event = abi::event_of(handle);
    check_has_waits(*event, "a stream waits for");
    executor().wait(abi::stream_of(stream), event);
  });
}
VNPU_ACL(aclrtResetEvent, (aclrtEvent handle, aclrtStream stream)) {
  // Nothing to reset: a wait refers to the record before it.
  return guarded("aclrtResetEvent", [&] {
    check_has_waits(*abi::event_of(handle), "a stream resets");
    abi::stream_of(stream);
  });
}
VNPU_ACL(aclrtSynchronizeEvent, (aclrtEvent handle)) {
  return guarded("aclrtSynchronizeEvent",
                 [&] { executor().synchronize(abi::event_of(handle), std::nullopt); });
}
VNPU_ACL(aclrtQueryEventStatus, (aclrtEvent handle, aclrtEventRecordedStatus* status)) {
  return guarded("aclrtQueryEventStatus", [&] {
    *status = executor().query(abi::event_of(handle)) ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                                      : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  });
}
VNPU_ACL(aclrtQueryEventWaitStatus, (aclrtEvent handle, aclrtEventWaitStatus* status)) {
  return guarded("aclrtQueryEventWaitStatus", [&] {
    *status = executor().query(abi::event_of(handle)) ? ACL_EVENT_WAIT_STATUS_COMPLETE
                                                      : ACL_EVENT_WAIT_STATUS_NOT_READY;
  });
}
VNPU_ACL(aclrtEventElapsedTime, (float* ms, aclrtEvent start, aclrtEvent end)) {
  return guarded("aclrtEventElapsedTime", [&] {
    const EventPtr& from = abi::event_of(start);
    const EventPtr& to = abi::event_of(end);
    if (from->newest() == 0 || to->newest() == 0) {
      throw Failure(FailureKind::kInvalidHandle,
                    "vnpu: elapsed time needs two recorded events; record them first.");
    }
    executor().synchronize(from, std::nullopt);
    executor().synchronize(to, std::nullopt);
    *ms = static_cast<float>(static_cast<double>(time_of(*to) - time_of(*from)) * 1e-9);
  });
}
VNPU_ACL(aclrtEventGetTimestamp, (aclrtEvent handle, uint64_t* microseconds)) {
  return guarded("aclrtEventGetTimestamp", [&] {
    const EventPtr& event = abi::event_of(handle);
    executor().synchronize(event, std::nullopt);
    *microseconds = static_cast<uint64_t>(time_of(*event) / 1'000'000);
  });
}
