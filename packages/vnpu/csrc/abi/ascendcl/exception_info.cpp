// The callback that a program has called for each task that fails on a device.

#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

#include "abi/ascendcl/declarations.h"
#include "device/observer.h"

using namespace vnpu;
using abi::guarded;

// Opaque in acl_rt.h: programs ask it with the functions below.
struct rtExceptionInfo {
  uint32_t task_id;  // counts the launches of a stream, from 0
  uint32_t stream_id;
  uint32_t thread_id;  // of the host, that launched the task
  uint32_t device_id;
  uint32_t status;
};

namespace {

constexpr uint32_t kNone = 0xFFFFFFFF;  // where info is null

std::atomic<aclrtExceptionInfoCallback> callback{nullptr};

// Notes who launched what, and calls the callback where it fails.
class ExceptionReporter final : public Observer {
 public:
  Needs needs() const override { return {}; }

  void on_launch(const Stream& stream, const Task& task, const std::string&) override {
    const std::lock_guard lock(mutex_);
    launches_.insert_or_assign(
        &task, Launch{launched_[stream.id]++, static_cast<uint32_t>(::gettid()), stream.id});
  }

  void on_end(const Stream& stream, const Task& task, bool failed) override {
    Launch launch{kNone, kNone, stream.id};
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = launches_.find(&task); found != launches_.end()) {
        launch = found->second;
        launches_.erase(found);
      }
      // What stands behind a failed task is dropped and does not end.
      if (failed)
        std::erase_if(launches_, [&](const auto& each) { return each.second.stream == stream.id; });
    }
    const aclrtExceptionInfoCallback function = callback.load();
    // A task that is given up has no exception in flight, and is none.
    if (!failed || function == nullptr || std::current_exception() == nullptr) return;
    rtExceptionInfo info{launch.task_id, static_cast<uint32_t>(stream.id), launch.thread_id,
                         static_cast<uint32_t>(stream.device), status_in_flight()};
    function(&info);
  }

 private:
  struct Launch {
    uint32_t task_id;
    uint32_t thread_id;
    int stream;
  };

  static uint32_t status_in_flight() {
    try {
      throw;
    } catch (const Failure& failure) {
      return static_cast<uint32_t>(abi::status_of(failure.kind));
    } catch (const std::bad_alloc&) {
      return static_cast<uint32_t>(abi::status_of(FailureKind::kOutOfMemory));
    } catch (...) {
      return static_cast<uint32_t>(abi::status_of(FailureKind::kInternal));
    }
  }

  std::mutex mutex_;
  std::map<const Task*, Launch> launches_;
  std::map<int, uint32_t> launched_;  // by stream
};

}  // namespace

VNPU_ACL(aclrtSetExceptionInfoCallback, (aclrtExceptionInfoCallback function)) {
  return guarded("aclrtSetExceptionInfoCallback", [&] {
    static std::mutex mutex;
    static ExceptionReporter* reporter = nullptr;
    const std::lock_guard lock(mutex);
    callback = function;
    if (reporter != nullptr || function == nullptr) return;
    reporter = new ExceptionReporter();  // tasks may outlive static objects
    Observers::instance().add(*reporter);
  });
}

#define VNPU_EXCEPTION_INFO(NAME, MEMBER)                          \
  extern "C" __attribute__((visibility("default"))) uint32_t NAME( \
      const aclrtExceptionInfo* info) {                            \
    return info == nullptr ? kNone : info->MEMBER;                 \
  }
VNPU_EXCEPTION_INFO(aclrtGetTaskIdFromExceptionInfo, task_id)
VNPU_EXCEPTION_INFO(aclrtGetStreamIdFromExceptionInfo, stream_id)
VNPU_EXCEPTION_INFO(aclrtGetThreadIdFromExceptionInfo, thread_id)
VNPU_EXCEPTION_INFO(aclrtGetDeviceIdFromExceptionInfo, device_id)
VNPU_EXCEPTION_INFO(aclrtGetErrorCodeFromExceptionInfo, status)
