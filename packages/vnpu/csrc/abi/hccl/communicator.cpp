// Communicators: creation, names, errors.

#include "abi/hccl/communicator.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string_view>

#include "device/checked_sizes.h"
#include "device/configuration.h"
#include "device/memory.h"
#include "device/system.h"

namespace vnpu::abi {
namespace {

// A handle is a number, never an address: a stale one is recognised instead of being followed.
class Communicators {
 public:
  static Communicators& instance() {
    // Never destroyed: torch_npu destroys communicators after static destructors have run.
    static Communicators* const communicators = new Communicators();
    return *communicators;
  }
  HcclComm add(GroupPtr group) {
    std::lock_guard lock(mutex_);
    const uintptr_t handle = next_ += 16;
    groups_.emplace(handle, std::move(group));
    return reinterpret_cast<HcclComm>(handle);
  }
  GroupPtr find(HcclComm communicator) {
    std::lock_guard lock(mutex_);
    const auto it = groups_.find(reinterpret_cast<uintptr_t>(communicator));
    if (it == groups_.end()) {
      throw Failure(FailureKind::kInvalidHandle,
                    "vnpu: this is not a live communicator (destroyed before its last use?).");
    }
    return it->second;
  }
  void remove(HcclComm communicator) {
    const GroupPtr group = find(communicator);
    forget_group(group);
    std::lock_guard lock(mutex_);
    groups_.erase(reinterpret_cast<uintptr_t>(communicator));
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, GroupPtr> groups_;
  uintptr_t next_ = 0x68636300;
};

Invitation invitation_of(const HcclRootInfo& info) {
  static_assert(sizeof(Invitation) <= sizeof(HcclRootInfo));
  Invitation invitation;
  std::memcpy(&invitation, info.internal, sizeof(invitation));
  return invitation;
}

// HCCL_BUFFSIZE: MiB, at least 1. Source: HCCL's documentation, environment variables.
uint64_t buffer_bytes_of_environment() {
  constexpr uint64_t kDefaultMib = 200;
  const char* const text = std::getenv("HCCL_BUFFSIZE");
  if (text == nullptr || *text == '\0') return kDefaultMib << 20;
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text, &end, 10);
  if (*end != '\0' || number < 1 || *text == '-') {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: HCCL_BUFFSIZE='") + text +
                      "' is not valid. Expected a number of MiB, at least 1.");
  }
  return checked_multiply<uint64_t>(number, uint64_t{1} << 20, "HCCL_BUFFSIZE in bytes");
}

// "a;b" by ';' to {"a", "b"}; an empty part stays.
std::vector<std::string_view> parts_of(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t at = 0;;) {
    const size_t end = text.find(separator, at);
    parts.push_back(text.substr(at, end == text.npos ? text.npos : end - at));
    if (end == text.npos) return parts;
    at = end + 1;
  }
}

// "level0:NA;level1:NHR": each level at most once. fullmesh is on no page; torch_npu's tests ask
// for it.
bool is_algorithm(std::string_view text) {
  using Names = std::set<std::string_view>;
  static const std::array<Names, 3> kLevels = {
      Names{"NA", "fullmesh"},
      Names{"ring", "H-D_R", "NHR", "NHR_V1", "NB", "AHC", "pipeline", "pairwise", "fullmesh"},
      Names{"ring", "H-D_R", "NHR", "NB", "pipeline"}};
  std::set<std::string_view> seen;
  for (const std::string_view part : parts_of(text, ';')) {
    const size_t colon = part.find(':');
    if (colon == part.npos) return false;
    const std::string_view level = part.substr(0, colon);
    if (level.size() != 6 || level.substr(0, 5) != "level" || !seen.insert(level).second) {
      return false;
    }
    const size_t number = static_cast<size_t>(level[5] - '0');
    if (number >= kLevels.size() || kLevels[number].count(part.substr(colon + 1)) == 0) {
      return false;
    }
  }
  return true;
}

// Either of all operations or, by '/', of some. Which one runs makes no difference here. Source:
// HCCL's documentation, environment variables, HCCL_ALGO; a communicator's hcclAlgo has its form.
void check_algorithms(std::string text, const char* of) {
  static const std::set<std::string_view> kOperations = {
      "allgather", "reducescatter", "allreduce", "broadcast", "reduce", "scatter", "alltoall"};
  std::erase(text, ' ');
  if (text.empty()) return;
  const std::vector<std::string_view> parts = parts_of(text, '/');
  const bool known = std::all_of(parts.begin(), parts.end(), [&](std::string_view part) {
    const size_t equals = part.find('=');
    if (equals == part.npos) return parts.size() == 1 && is_algorithm(part);
    return kOperations.count(part.substr(0, equals)) > 0 && is_algorithm(part.substr(equals + 1));
  });
  if (known) return;
  if (text.size() > 100) text = text.substr(0, 100) + "...";
  throw Failure(FailureKind::kInvalidArgument,
                std::string("vnpu: ") + of + "='" + text +
                    "' is not valid. Expected level0:NA;level1:ALGORITHM, or for each operation "
                    "OPERATION=level0:NA;level1:ALGORITHM/..., for example "
                    "allreduce=level0:NA;level1:ring/allgather=level0:NA;level1:H-D_R.");
}

// What of a configuration matters here. Fields beyond the size that the caller states are not read.
struct Settings {
  std::string name;
  TimeLimits limits = TimeLimits::from_environment();
  uint64_t buffer_bytes = buffer_bytes_of_environment();

  explicit Settings(const HcclCommConfig* config) {
    if (const char* const text = std::getenv("HCCL_ALGO")) check_algorithms(text, "HCCL_ALGO");
    if (config == nullptr) return;
    size_t size = 0;
    std::memcpy(&size, config->reserved, sizeof(size));
    if (size >= offsetof(HcclCommConfig, hcclCommName) + sizeof(config->hcclCommName)) {
      name.assign(config->hcclCommName,
                  ::strnlen(config->hcclCommName, sizeof(config->hcclCommName)));
    }
    if (size >= offsetof(HcclCommConfig, hcclExecTimeOut) + sizeof(config->hcclExecTimeOut) &&
        config->hcclExecTimeOut != HCCL_COMM_EXECTIMEOUT_CONFIG_NOT_SET &&
        config->hcclExecTimeOut >= 0) {
      limits.execute = std::chrono::seconds(config->hcclExecTimeOut);
    }
    if (size >= offsetof(HcclCommConfig, hcclBufferSize) + sizeof(config->hcclBufferSize) &&
        config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) {
      buffer_bytes = uint64_t{config->hcclBufferSize} << 20;
    }
    if (size >= offsetof(HcclCommConfig, hcclAlgo) + sizeof(config->hcclAlgo)) {
      check_algorithms(
          std::string(config->hcclAlgo, ::strnlen(config->hcclAlgo, sizeof(config->hcclAlgo))),
          "hcclAlgo");
    }
  }
};

GroupPtr join(const Meeting& meeting, uint32_t ranks, uint32_t rank, int device,
              Settings settings) {
  auto group = std::make_shared<Group>(meeting, ranks, rank, device, std::move(settings.name),
                                       settings.limits);
  group->buffer_bytes = settings.buffer_bytes;
  const Configuration& configuration = Configuration::instance();
  if (configuration.strict && !configuration.is_reference) {
    // One to send from and one to receive into.
    const size_t both =
        checked_multiply<size_t>(2, settings.buffer_bytes, "the size of two HCCL buffers");
    group->buffers =
        std::shared_ptr<void>(Memory::instance().allocate(device, both),
                              [](void* memory) { Memory::instance().release(memory); });
  }
  register_group(group);
  return group;
}

GroupPtr meet_and_join(const Invitation& invitation, uint32_t ranks, uint32_t rank, int device,
                       const HcclCommConfig* config, const std::string& name_if_none = "") {
  Settings settings(config);
  if (settings.name.empty()) settings.name = name_if_none;
  const Meeting meeting = meet(invitation, ranks, rank, settings.limits.connect);
  return join(meeting, ranks, rank, device, std::move(settings));
}

}  // namespace

HcclResult result_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::kInvalidArgument:
    case FailureKind::kInvalidHandle:
    case FailureKind::kNoSuchDevice:
    case FailureKind::kIllegalAddress:
    case FailureKind::kOperatorInvalid:
    case FailureKind::kTilingRefused:
    case FailureKind::kCaptureConflict: return HCCL_E_PARA;
    case FailureKind::kOutOfMemory:
    case FailureKind::kTooManyStreams: return HCCL_E_OOM;
    case FailureKind::kTooManyEvents: return HCCL_E_OOM;
    case FailureKind::kWaitTimeout:
    case FailureKind::kRemoteTimeout: return HCCL_E_TIMEOUT;
    case FailureKind::kRemoteLost: return HCCL_E_REMOTE;
    case FailureKind::kNotSupported: return HCCL_E_NOT_SUPPORT;
    case FailureKind::kRace:
    case FailureKind::kDeviceNotSet:
    case FailureKind::kOperatorFailed: return HCCL_E_RUNTIME;
    case FailureKind::kInternal: return HCCL_E_INTERNAL;
  }
  return HCCL_E_INTERNAL;
}

GroupPtr group_of(HcclComm communicator) { return Communicators::instance().find(communicator); }

ElementType element_type(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return ElementType::kInt8;
    case HCCL_DATA_TYPE_INT16: return ElementType::kInt16;
    case HCCL_DATA_TYPE_INT32: return ElementType::kInt32;
    case HCCL_DATA_TYPE_FP16: return ElementType::kFloat16;
    case HCCL_DATA_TYPE_FP32: return ElementType::kFloat32;
    case HCCL_DATA_TYPE_INT64: return ElementType::kInt64;
    case HCCL_DATA_TYPE_UINT64: return ElementType::kUint64;
    case HCCL_DATA_TYPE_UINT8: return ElementType::kUint8;
    case HCCL_DATA_TYPE_UINT16: return ElementType::kUint16;
    case HCCL_DATA_TYPE_UINT32: return ElementType::kUint32;
    case HCCL_DATA_TYPE_FP64: return ElementType::kFloat64;
    case HCCL_DATA_TYPE_BFP16: return ElementType::kBfloat16;
    case HCCL_DATA_TYPE_INT128: return ElementType::kInt128;
    case HCCL_DATA_TYPE_HIF8: return ElementType::kHifloat8;
    case HCCL_DATA_TYPE_FP8E4M3: return ElementType::kFloat8E4m3;
    case HCCL_DATA_TYPE_FP8E5M2: return ElementType::kFloat8E5m2;
    case HCCL_DATA_TYPE_FP8E8M0: return ElementType::kFloat8E8m0;
    case HCCL_DATA_TYPE_RESERVED: break;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: there is no HCCL data type " + std::to_string(type) + ".");
}

Reduction reduction(HcclReduceOp operation) {
  switch (operation) {
    case HCCL_REDUCE_SUM: return Reduction::kSum;
    case HCCL_REDUCE_PROD: return Reduction::kProduct;
    case HCCL_REDUCE_MAX: return Reduction::kMaximum;
    case HCCL_REDUCE_MIN: return Reduction::kMinimum;
    case HCCL_REDUCE_RESERVED: break;
  }
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: there is no HCCL reduction " + std::to_string(operation) + ".");
}

void submit(aclrtStream stream, TaskPtr task) {
  System::instance().executor().submit(stream_of(stream), std::move(task));
}

}  // namespace vnpu::abi

using namespace vnpu;
using namespace vnpu::abi;

VNPU_HCCL(HcclResult, HcclGetRootInfo, (HcclRootInfo * info)) {
  return hccl_guarded("HcclGetRootInfo", [&] {
    const Invitation invitation = invite();
    std::memset(info->internal, 0, sizeof(info->internal));
    std::memcpy(info->internal, &invitation, sizeof(invitation));
  });
}

VNPU_HCCL(HcclResult, HcclCommInitRootInfoConfig,
          (uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config,
           HcclComm* communicator)) {
  return hccl_guarded("HcclCommInitRootInfoConfig", [&] {
    const int device = System::instance().require_current_device();
    const GroupPtr group = meet_and_join(invitation_of(*info), ranks, rank, device, config);
    group->await_all();
    *communicator = Communicators::instance().add(group);
  });
}

VNPU_HCCL(HcclResult, HcclCommInitRootInfo,
          (uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* communicator)) {
  return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, communicator);
}

// What RANK_TABLE_FILE names stands for the root information.
VNPU_HCCL(HcclResult, HcclCommInitClusterInfoConfig,
          (const char* cluster_info, uint32_t rank, HcclCommConfig* config,
           HcclComm* communicator)) {
  return hccl_guarded("HcclCommInitClusterInfoConfig", [&] {
    const int device = System::instance().require_current_device();
    const RankTable table = meeting_room().read_table(cluster_info, rank);
    Invitation invitation{Invitation::kMagic, 0, {}, 0, -1, {}, {}, {}};
    if (rank == 0) invitation = Segment::create();
    invitation.meeting_point = table.meeting_point;
    const GroupPtr group = meet_and_join(invitation, table.ranks, rank, device, config);
    group->await_all();
    *communicator = Communicators::instance().add(group);
  });
}

VNPU_HCCL(HcclResult, HcclCreateSubCommConfig,
          (HcclComm * communicator, uint32_t ranks, uint32_t* rank_ids, uint64_t id, uint32_t rank,
           HcclCommConfig* config, HcclComm* derived)) {
  return hccl_guarded("HcclCreateSubCommConfig", [&] {
    const GroupPtr whole = group_of(*communicator);
    constexpr uint64_t kNoMember = 0xFFFFFFFF;
    if (rank_ids == nullptr && id == kNoMember) {
      *derived = nullptr;
      return;
    }
    if (rank_ids == nullptr || rank >= ranks || rank_ids[rank] != whole->rank()) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: rankIds[subCommRankId=" + std::to_string(rank) + "] of " +
                        std::to_string(ranks) + " is not this rank's own number in group " +
                        whole->name() + ", " + std::to_string(whole->rank()) + ".");
    }
    const std::vector<uint32_t> members(rank_ids, rank_ids + ranks);
    const std::set<uint32_t> distinct(members.begin(), members.end());
    if (distinct.size() != ranks || *distinct.rbegin() >= whole->ranks()) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: rankIds names a rank twice, or one that group " + whole->name() +
                        " of " + std::to_string(whole->ranks()) + " ranks does not have.");
    }
    if (whole->is_derived) {
      throw Failure(FailureKind::kNotSupported,
                    "vnpu: group " + whole->name() +
                        " is itself derived from another. Derive from the global one.");
    }
    whole->derive(members, id, [&](const Invitation& invitation) {
      const GroupPtr group = meet_and_join(invitation, ranks, rank, whole->device(), config,
                                           whole->name() + "_sub_" + std::to_string(id));
      group->is_derived = true;
      group->await_all();
      *derived = Communicators::instance().add(group);
    });
  });
}

VNPU_HCCL(HcclResult, HcclCommInitAll,
          (uint32_t devices_count, int32_t* devices, HcclComm* communicators)) {
  return hccl_guarded("HcclCommInitAll", [&] {
    const Invitation invitation = Segment::create();
    std::vector<GroupPtr> groups;
    for (uint32_t rank = 0; rank < devices_count; ++rank) {
      System::instance().physical(devices[rank]);  // throws if there is no such device
      groups.push_back(
          join(meet_here(invitation, rank), devices_count, rank, devices[rank], Settings(nullptr)));
    }
    for (uint32_t rank = 0; rank < devices_count; ++rank) {
      groups[rank]->await_all();
      communicators[rank] = Communicators::instance().add(groups[rank]);
    }
  });
}

VNPU_HCCL(HcclResult, HcclCommDestroy, (HcclComm communicator)) {
  return hccl_guarded("HcclCommDestroy", [&] { Communicators::instance().remove(communicator); });
}

VNPU_HCCL(HcclResult, HcclGetRankSize, (HcclComm communicator, uint32_t* ranks)) {
  return hccl_guarded("HcclGetRankSize", [&] { *ranks = group_of(communicator)->ranks(); });
}

VNPU_HCCL(HcclResult, HcclGetRankId, (HcclComm communicator, uint32_t* rank)) {
  return hccl_guarded("HcclGetRankId", [&] { *rank = group_of(communicator)->rank(); });
}

VNPU_HCCL(HcclResult, HcclGetCommName, (HcclComm communicator, char* name)) {
  return hccl_guarded("HcclGetCommName", [&] {
    const std::string text = group_of(communicator)->name();
    std::memset(name, 0, COMM_NAME_MAX_LENGTH);
    text.copy(name, COMM_NAME_MAX_LENGTH - 1);
  });
}

VNPU_HCCL(HcclResult, HcclGetCommAsyncError, (HcclComm communicator, HcclResult* error)) {
  return hccl_guarded("HcclGetCommAsyncError", [&] {
    const GroupPtr group = group_of(communicator);
    // The text of the failure becomes this thread's recent error, which torch_npu prints.
    *error = hccl_guarded("HcclGetCommAsyncError", [&] { group->throw_if_failed_for_long(); });
  });
}

VNPU_HCCL(uint32_t, HcclGetCommConfigCapability, ()) {
  return HCCL_COMM_CONFIG_BUFFER_NAME + 1;  // features are counted; this is the last known one
}

VNPU_HCCL(HcclResult, HcclSetConfig, (HcclConfig config, HcclConfigValue value)) {
  return hccl_guarded("HcclSetConfig", [&] {
    // Reductions always are in the order of the ranks: both settings of determinism hold.
    if (config == HCCL_DETERMINISTIC && value.value >= 0 && value.value <= 2) return;
    throw Failure(FailureKind::kNotSupported, "vnpu: HcclSetConfig(" + std::to_string(config) +
                                                  ", " + std::to_string(value.value) +
                                                  ") is not supported.");
  });
}

VNPU_HCCL(const char*, HcclGetErrorString, (HcclResult code)) {
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_PTR: return "empty pointer";
    case HCCL_E_MEMORY: return "memory error";
    case HCCL_E_INTERNAL: return "internal error";
    case HCCL_E_NOT_SUPPORT: return "not supported";
    case HCCL_E_NOT_FOUND: return "resource not found";
    case HCCL_E_UNAVAIL: return "resource unavailable";
    case HCCL_E_SYSCALL: return "system call error";
    case HCCL_E_TIMEOUT: return "timeout";
    case HCCL_E_OPEN_FILE_FAILURE: return "file cannot be opened";
    case HCCL_E_TCP_CONNECT: return "TCP connection error";
    case HCCL_E_ROCE_CONNECT: return "RoCE connection error";
    case HCCL_E_TCP_TRANSFER: return "TCP transfer error";
    case HCCL_E_ROCE_TRANSFER: return "RoCE transfer error";
    case HCCL_E_RUNTIME: return "runtime error";
    case HCCL_E_DRV: return "driver error";
    case HCCL_E_PROFILING: return "profiling error";
    case HCCL_E_CCE: return "CCE error";
    case HCCL_E_NETWORK: return "network error";
    case HCCL_E_AGAIN: return "try again";
    case HCCL_E_REMOTE: return "remote rank lost";
    case HCCL_E_SUSPENDING: return "communicator is suspending";
    case HCCL_E_OPRETRY_FAIL: return "retry failed";
    case HCCL_E_OOM: return "out of memory";
    case HCCL_E_RESERVED: break;
  }
  return "unknown error";
}
