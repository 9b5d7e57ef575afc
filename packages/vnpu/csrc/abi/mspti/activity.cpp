// libmspti: activities of the devices, as torch's profiler takes them through torch_npu.
//
// Kernels, collectives, and which launch belongs to which region of the program. Other kinds are
// refused: a virtual NPU has no records of them.

#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>

#include "abi/mspti/records.h"
#include "trace/activities.h"

using namespace vnpu;
using namespace vnpu::mspti;
using trace::Activities;
using trace::Activity;

#define VNPU_MSPTI(TYPE, NAME, PARAMETERS) \
  extern "C" __attribute__((visibility("default"))) TYPE NAME PARAMETERS

struct msptiSubscriber_st {};

namespace {

using RequestBuffer = void (*)(uint8_t** buffer, size_t* bytes, size_t* most_records);
using CompleteBuffer = void (*)(uint8_t* buffer, size_t bytes, size_t valid_bytes);

struct Client {
  std::mutex mutex;  // one delivery at a time
  RequestBuffer request = nullptr;
  CompleteBuffer complete = nullptr;
  msptiSubscriber_st subscriber;
  bool is_subscribed = false;
};

Client& client() {
  static auto* const made = new Client();
  return *made;
}

// Times in records are nanoseconds since 1970.
int64_t system_time() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Activities& activities() {
  static Activities& made = Activities::make(&system_time);
  return made;
}

std::optional<Activity::Kind> kind_of(int kind) {
  switch (kind) {
    case kKernel: return Activity::Kind::kOperator;
    case kCommunication: return Activity::Kind::kCollective;
    case kExternalCorrelation: return Activity::Kind::kLaunch;
    default: return std::nullopt;
  }
}

// Source: msptiCommunicationDataType.
int32_t data_type(std::optional<ElementType> type) {
  constexpr int32_t kNone = 0xFFFF;
  if (!type.has_value()) return kNone;
  switch (*type) {
    case ElementType::kInt8: return 0;
    case ElementType::kInt16: return 1;
    case ElementType::kInt32: return 2;
    case ElementType::kFloat16: return 3;
    case ElementType::kFloat32: return 4;
    case ElementType::kInt64: return 5;
    case ElementType::kUint64: return 6;
    case ElementType::kUint8: return 7;
    case ElementType::kUint16: return 8;
    case ElementType::kUint32: return 9;
    case ElementType::kFloat64: return 10;
    case ElementType::kBfloat16: return 11;
    case ElementType::kInt128: return 12;
    case ElementType::kHifloat8: return 14;
    case ElementType::kFloat8E4m3: return 15;
    case ElementType::kFloat8E5m2: return 16;
    case ElementType::kFloat8E8m0: return 17;
  }
  return kNone;
}

// Buffers of the client's, filled one after the other.
class Delivery {
 public:
  explicit Delivery(Client& to) : to_(to) {}
  ~Delivery() { finish(); }

  void add(const Activity& activity) {
    const auto begin = static_cast<uint64_t>(activity.begin);
    const auto end = static_cast<uint64_t>(activity.end);
    const auto device = static_cast<uint32_t>(activity.device);
    const auto stream = static_cast<uint32_t>(activity.stream);
    switch (activity.kind) {
      case Activity::Kind::kOperator:
        put(KernelRecord{.start = begin,
                         .end = end,
                         .device = device,
                         .stream = stream,
                         .correlation = activity.launch,
                         .type = "KERNEL_AICORE",
                         .name = activity.name});
        break;
      case Activity::Kind::kCollective:
        put(CommunicationRecord{.data_type = data_type(activity.type),
                                .count = activity.count,
                                .device = device,
                                .stream = stream,
                                .start = begin,
                                .end = end,
                                .algorithm = "",
                                .name = activity.name,
                                .group = activity.group,
                                .correlation = activity.launch});
        break;
      case Activity::Kind::kLaunch:
        put(ExternalCorrelationRecord{.external_kind = activity.region_kind,
                                      .external = activity.region,
                                      .correlation = activity.launch});
        break;
      default: break;  // kinds that collect() refuses
    }
  }

 private:
  // A client that gives no buffer loses records.
  template <class Record>
  void put(const Record& record) {
    if (buffer_ != nullptr && (used_ + sizeof(Record) > bytes_ || records_ == most_)) finish();
    if (buffer_ == nullptr) {
      to_.request(&buffer_, &bytes_, &most_);
      if (most_ == 0) most_ = bytes_ / sizeof(AnyRecord);
    }
    if (buffer_ == nullptr || sizeof(Record) > bytes_) return;
    std::memcpy(buffer_ + used_, &record, sizeof(Record));
    used_ += sizeof(Record);
    ++records_;
  }
  void finish() {
    if (buffer_ != nullptr) to_.complete(buffer_, bytes_, used_);
    buffer_ = nullptr;
    used_ = records_ = 0;
  }

  Client& to_;
  uint8_t* buffer_ = nullptr;
  size_t bytes_ = 0;
  size_t most_ = 0;
  size_t used_ = 0;
  size_t records_ = 0;
};

void deliver() {
  Client& to = client();
  const std::lock_guard lock(to.mutex);
  if (to.request == nullptr) return;
  Delivery delivery(to);
  for (const Activity& activity : activities().take()) delivery.add(activity);
}

Result collect(int kind, bool is_wanted) {
  const std::optional<Activity::Kind> known = kind_of(kind);
  if (!known.has_value()) return kInvalidKind;
  activities().collect(*known, is_wanted);
  return kSuccess;
}

size_t size_of(int32_t kind) {
  switch (kind) {
    case kKernel: return sizeof(KernelRecord);
    case kCommunication: return sizeof(CommunicationRecord);
    case kExternalCorrelation: return sizeof(ExternalCorrelationRecord);
    default: return 0;
  }
}

}  // namespace

// One client at a time. `callback` is for calls of the runtime, which have no domain here.
VNPU_MSPTI(int, msptiSubscribe,
           (msptiSubscriber_st * *subscriber, void* /*callback*/, void* /*user_data*/)) {
  if (subscriber == nullptr) return kInvalidParameter;
  Client& own = client();
  const std::lock_guard lock(own.mutex);
  if (own.is_subscribed) return kMultipleSubscribers;
  own.is_subscribed = true;
  *subscriber = &own.subscriber;
  return kSuccess;
}

VNPU_MSPTI(int, msptiUnsubscribe, (msptiSubscriber_st * subscriber)) {
  Client& own = client();
  const std::lock_guard lock(own.mutex);
  if (subscriber != &own.subscriber || !own.is_subscribed) return kInvalidParameter;
  own.is_subscribed = false;
  return kSuccess;
}

VNPU_MSPTI(int, msptiActivityRegisterCallbacks, (RequestBuffer request, CompleteBuffer complete)) {
  if (request == nullptr || complete == nullptr) return kInvalidParameter;
  Client& own = client();
  const std::lock_guard lock(own.mutex);
  own.request = request;
  own.complete = complete;
  activities().on_full(&deliver);
  return kSuccess;
}

VNPU_MSPTI(int, msptiActivityEnable, (int kind)) { return collect(kind, true); }

VNPU_MSPTI(int, msptiActivityDisable, (int kind)) { return collect(kind, false); }

VNPU_MSPTI(bool, msptiActivityIsEnabled, (int kind)) {
  const std::optional<Activity::Kind> known = kind_of(kind);
  return known.has_value() && activities().collects(*known);
}

VNPU_MSPTI(int, msptiActivityFlushAll, (uint32_t /*flag*/)) {
  deliver();
  return kSuccess;
}

VNPU_MSPTI(int, msptiActivityGetNextRecord,
           (uint8_t* buffer, size_t valid_bytes, AnyRecord** record)) {
  if (buffer == nullptr || record == nullptr) return kInvalidParameter;
  uint8_t* next = buffer;
  if (*record != nullptr) {
    const size_t bytes = size_of((*record)->kind);
    if (bytes == 0) return kInvalidKind;
    next = reinterpret_cast<uint8_t*>(*record) + bytes;
  }
  if (next >= buffer + valid_bytes) return kMaxLimitReached;
  *record = reinterpret_cast<AnyRecord*>(next);
  return kSuccess;
}

VNPU_MSPTI(int, msptiActivityPushExternalCorrelationId, (int kind, uint64_t id)) {
  Activities::enter_region(kind, id);
  return kSuccess;
}

VNPU_MSPTI(int, msptiActivityPopExternalCorrelationId, (int kind, uint64_t* last)) {
  const std::optional<uint64_t> region = Activities::leave_region(kind);
  if (!region.has_value()) return kQueueEmpty;
  if (last != nullptr) *last = *region;
  return kSuccess;
}
