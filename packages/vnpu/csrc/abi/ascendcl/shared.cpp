// Memory and events that several processes use.

#include <cstring>
#include <string>
#include <vector>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/freed_memory.h"
#include "device/shared_file.h"
#include "device/shared_memory.h"
#include "interface/handles.h"

using namespace vnpu;
using abi::executor;
using abi::guarded;

namespace {

constexpr size_t kKeyBytes = 65;  // with the zero at its end
constexpr char kEvent[] = "vnpu-event";

template <size_t kMost>
std::string text_of(const char* key, const char* function) {
  const void* const end = key == nullptr ? nullptr : std::memchr(key, '\0', kMost);
  if (end == nullptr) {
    throw Failure(FailureKind::kInvalidArgument,
                  std::string("vnpu: ") + function + " needs a key of less than " +
                      std::to_string(kMost) + " characters: pass it on with its end.");
  }
  return key;
}

void check_flags(uint64_t flags, uint64_t known, const char* function) {
  if ((flags & ~known) == 0) return;
  throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: ") + function + " has flags " +
                                                   std::to_string(flags) + ", of which it knows " +
                                                   std::to_string(known) + ".");
}

}  // namespace

VNPU_ACL(aclrtIpcMemGetExportKey,
         (void* address, size_t bytes, char* key, size_t length, uint64_t flags)) {
  constexpr const char* kName = "aclrtIpcMemGetExportKey";
  return guarded(kName, [&] {
    check_flags(flags, ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION, kName);
    if (key == nullptr || length < kKeyBytes) {
      throw Failure(FailureKind::kInvalidArgument,
                    std::string("vnpu: ") + kName + " has room for a key of " +
                        std::to_string(length) + " bytes: give " + std::to_string(kKeyBytes) + ".");
    }
    std::string text;
    executor().while_nothing_runs(
        [&] { text = SharedMemory::instance().export_key(address, bytes, flags != 0); });
    std::strncpy(key, text.c_str(), length);
  });
}
VNPU_ACL(aclrtIpcMemSetImportPid, (const char* key, int32_t* pids, size_t count)) {
  constexpr const char* kName = "aclrtIpcMemSetImportPid";
  return guarded(kName, [&] {
    const std::string text = text_of<kKeyBytes>(key, kName);
    if (pids == nullptr || count == 0) {
      throw Failure(FailureKind::kInvalidArgument,
                    std::string("vnpu: ") + kName + " names no process: give one or more.");
    }
    SharedMemory::instance().allow(text, std::vector<pid_t>(pids, pids + count));
  });
}
VNPU_ACL(aclrtIpcMemImportByKey, (void** address, const char* key, uint64_t flags)) {
  constexpr const char* kName = "aclrtIpcMemImportByKey";
  return guarded(kName, [&] {
    check_flags(flags, ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS, kName);
    *address = SharedMemory::instance().import(text_of<kKeyBytes>(key, kName));
  });
}
VNPU_ACL(aclrtIpcMemClose, (const char* key)) {
  constexpr const char* kName = "aclrtIpcMemClose";
  return guarded(kName, [&] {
    const std::string text = text_of<kKeyBytes>(key, kName);
    if (const void* const address = SharedMemory::instance().last_import(text)) {
      abi::tell_of_free(address, kName);
      abi::run_what_is_queued(kName);
    }
    SharedMemory::instance().close(text);
  });
}

VNPU_ACL(aclrtIpcGetEventHandle, (aclrtEvent handle, aclrtIpcEventHandle* shared)) {
  return guarded("aclrtIpcGetEventHandle", [&] {
    const EventPtr& event = abi::event_of(handle);
    if (event->shared == nullptr) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: aclrtIpcGetEventHandle of an event with flags " +
                        std::to_string(event->flags) +
                        ": create it with ACL_EVENT_IPC (64) for other processes.");
    }
    const std::string text = shared_file::key_of(kEvent, event->shared->identity);
    std::strncpy(shared->reserved, text.c_str(), sizeof(shared->reserved));
  });
}
VNPU_ACL(aclrtIpcOpenEventHandle, (aclrtIpcEventHandle shared, aclrtEvent* event)) {
  constexpr const char* kName = "aclrtIpcOpenEventHandle";
  return guarded(kName, [&] {
    const std::string text = text_of<ACL_IPC_EVENT_HANDLE_SIZE>(shared.reserved, kName);
    auto records = SharedRecords::open(shared_file::identity_of(kEvent, text));
    *event = abi::make_handle(
        std::make_shared<Event>(ACL_EVENT_IPC, Event::Holds::kWhileRecorded, std::move(records)));
  });
}
