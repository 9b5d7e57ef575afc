// Communicators: creation, names, failures.

#include "abi/hccl/communicator.h"

#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "abi/hccl/communicator_settings.h"
#include "collective/group_registry.h"
#include "device/checked_sizes.h"
#include "device/configuration.h"
#include "device/memory.h"
#include "device/system.h"

namespace vnpu::abi {
namespace {

// A handle is a number, not an address, so that a stale handle is detected instead of dereferenced.
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

GroupPtr join(const Meeting& meeting, uint32_t ranks, uint32_t rank, int device,
              CommunicatorSettings settings) {
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
  CommunicatorSettings settings(config);
  if (settings.name.empty()) settings.name = name_if_none;
  const Meeting meeting = meet(invitation, ranks, rank, settings.limits.connect);
  return join(meeting, ranks, rank, device, std::move(settings));
}

}  // namespace

GroupPtr group_of(HcclComm communicator) { return Communicators::instance().find(communicator); }

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

// The file in RANK_TABLE_FILE replaces the root information.
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
      groups.push_back(join(meet_here(invitation, rank), devices_count, rank, devices[rank],
                            CommunicatorSettings(nullptr)));
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
    // Reductions always follow the order of the ranks, which satisfies both settings of
    // determinism.
    if (config == HCCL_DETERMINISTIC && value.value >= 0 && value.value <= 2) return;
    throw Failure(FailureKind::kNotSupported, "vnpu: HcclSetConfig(" + std::to_string(config) +
                                                  ", " + std::to_string(value.value) +
                                                  ") is not supported.");
  });
}
