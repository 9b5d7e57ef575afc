// Streams, host functions and the older report protocol for host callbacks.

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

#include "abi/ascendcl/declarations.h"
#include "device/system.h"
#include "interface/handles.h"

using namespace vnpu;
using abi::executor;
using abi::guarded;

namespace {

class HostFunction final : public Task {
 public:
  HostFunction(aclrtHostFunc function, void* argument)
      : Task("host function"), function_(function), argument_(argument) {}
  Progress advance() override {
    function_(argument_);
    return Progress::kDone;
  }

 private:
  aclrtHostFunc function_;
  void* argument_;
};

// Callbacks that wait for the thread that subscribed to their stream.
class Reports {
 public:
  struct Callback {
    aclrtCallback function;
    void* argument;
    std::shared_ptr<std::atomic<bool>> ran;
  };
  static Reports& instance() {
    static Reports* const reports = new Reports();
    return *reports;
  }
  void subscribe(uint64_t thread, const Stream* stream) {
    std::lock_guard lock(mutex_);
    threads_[stream] = thread;
    waiting_[thread];
  }
  void unsubscribe(uint64_t thread, const Stream* stream) {
    std::lock_guard lock(mutex_);
    const auto it = threads_.find(stream);
    if (it == threads_.end() || it->second != thread) {
      throw Failure(
          FailureKind::kInvalidArgument,
          "vnpu: aclrtUnSubscribeReport of a stream that the thread did not subscribe to.");
    }
    threads_.erase(it);
    changed_.notify_all();
  }
  bool subscribed(const Stream* stream) {
    std::lock_guard lock(mutex_);
    return threads_.count(stream) != 0;
  }
  void put(const Stream* stream, Callback callback) {
    std::lock_guard lock(mutex_);
    waiting_[threads_.at(stream)].push_back(std::move(callback));
    changed_.notify_all();
  }
  // Runs one callback of the calling thread; false after `limit` without one.
  bool process(std::chrono::milliseconds limit) {
    const uint64_t self = ::pthread_self();
    std::unique_lock lock(mutex_);
    const auto it = waiting_.find(self);
    if (it == waiting_.end()) {
      std::this_thread::sleep_for(std::min(limit, std::chrono::milliseconds(10)));
      return false;
    }
    if (!changed_.wait_for(lock, limit, [&] { return !it->second.empty(); })) return false;
    const Callback callback = it->second.front();
    it->second.pop_front();
    lock.unlock();
    callback.function(callback.argument);
    callback.ran->store(true, std::memory_order_release);
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<const Stream*, uint64_t> threads_;
  std::map<uint64_t, std::deque<Callback>> waiting_;
};

class ReportedCallback final : public Task {
 public:
  ReportedCallback(aclrtCallback function, void* argument, bool block, const Stream* stream)
      : Task("host callback"),
        function_(function),
        argument_(argument),
        block_(block),
        stream_(stream) {}
  Progress advance() override {
    if (ran_ == nullptr) {
      ran_ = std::make_shared<std::atomic<bool>>(false);
      Reports::instance().put(stream_, {function_, argument_, ran_});
    }
    return !block_ || ran_->load(std::memory_order_acquire) ? Progress::kDone : Progress::kBlocked;
  }
  bool waits_outside() const override { return true; }
  std::string waiting_for() const override { return "the thread that processes reports"; }
  void rewind() override { ran_ = nullptr; }

 private:
  aclrtCallback function_;
  void* argument_;
  bool block_;
  const Stream* stream_;
  std::shared_ptr<std::atomic<bool>> ran_;
};

// A word of device memory as a gate between streams, host and other processes.
class ValueWait final : public Task {
 public:
  ValueWait(void* address, uint64_t value, uint32_t flag)
      : Task("value wait"), address_(static_cast<uint64_t*>(address)), value_(value), flag_(flag) {}
  Progress advance() override {
    const uint64_t seen = __atomic_load_n(Memory::instance().backing(address_), __ATOMIC_ACQUIRE);
    return reached(seen) ? Progress::kDone : Progress::kBlocked;
  }
  std::string waiting_for() const override {
    return "the device word to become " + std::to_string(value_);
  }

 private:
  bool reached(uint64_t seen) const {
    switch (flag_) {
      case 0: return static_cast<int64_t>(seen - value_) >= 0;
      case 1: return seen == value_;
      case 2: return (seen & value_) != 0;
      default: return ~(seen | value_) != 0;
    }
  }
  uint64_t* address_;
  uint64_t value_;
  uint32_t flag_;
};

class ValueWrite final : public Task {
 public:
  ValueWrite(void* address, uint64_t value)
      : Task("value write"), address_(static_cast<uint64_t*>(address)), value_(value) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    touched.add_written({begin, begin + sizeof(value)});  // a gate, not data: never a race
  }
  Progress advance() override {
    __atomic_store_n(Memory::instance().backing(address_), value_, __ATOMIC_RELEASE);
    return Progress::kDone;
  }

 private:
  uint64_t* address_;
  uint64_t value_;
};

Executor::Limit limit_of(int32_t timeout_ms) {
  return timeout_ms < 0 ? Executor::Limit()
                        : Executor::Limit(std::chrono::milliseconds(timeout_ms));
}

}  // namespace

VNPU_ACL(aclrtCreateStreamWithConfig, (aclrtStream * stream, uint32_t priority, uint32_t)) {
  return guarded("aclrtCreateStreamWithConfig", [&] {
    const int device = System::instance().require_current_device();
    *stream = abi::make_handle(executor().create_stream(device, priority));
  });
}
VNPU_ACL(aclrtCreateStream, (aclrtStream * stream)) {
  return aclrtCreateStreamWithConfig(stream, 0, 0);
}
VNPU_ACL(aclrtDestroyStream, (aclrtStream stream)) {
  return guarded("aclrtDestroyStream", [&] {
    if (stream == nullptr) return;
    executor().destroy_stream(abi::stream_of(stream));
    abi::drop_stream_handle(stream);
  });
}
VNPU_ACL(aclrtDestroyStreamForce, (aclrtStream stream)) { return aclrtDestroyStream(stream); }
VNPU_ACL(aclrtSynchronizeStream, (aclrtStream stream)) {
  return guarded("aclrtSynchronizeStream",
                 [&] { executor().synchronize(abi::stream_of(stream), std::nullopt); });
}
VNPU_ACL(aclrtSynchronizeStreamWithTimeout, (aclrtStream stream, int32_t timeout_ms)) {
  return guarded("aclrtSynchronizeStreamWithTimeout",
                 [&] { executor().synchronize(abi::stream_of(stream), limit_of(timeout_ms)); });
}
VNPU_ACL(aclrtStreamQuery, (aclrtStream stream, aclrtStreamStatus* status)) {
  return guarded("aclrtStreamQuery", [&] {
    *status = executor().query(abi::stream_of(stream)) ? ACL_STREAM_STATUS_COMPLETE
                                                       : ACL_STREAM_STATUS_NOT_READY;
  });
}
VNPU_ACL(aclrtStreamGetId, (aclrtStream stream, int32_t* id)) {
  return guarded("aclrtStreamGetId", [&] { *id = abi::stream_of(stream)->id; });
}
VNPU_ACL(aclrtSetStreamFailureMode, (aclrtStream stream, uint64_t)) {
  // A virtual stream always stops on failure.
  return guarded("aclrtSetStreamFailureMode", [&] { abi::stream_of(stream); });
}
VNPU_ACL(aclrtSetStreamAttribute, (aclrtStream stream, aclrtStreamAttr, aclrtStreamAttrValue*)) {
  return guarded("aclrtSetStreamAttribute", [&] { abi::stream_of(stream); });
}
VNPU_ACL(aclrtSetStreamOverflowSwitch, (aclrtStream stream, uint32_t)) {
  return guarded("aclrtSetStreamOverflowSwitch", [&] { abi::stream_of(stream); });
}
VNPU_ACL(aclrtGetStreamOverflowSwitch, (aclrtStream stream, uint32_t* flag)) {
  return guarded("aclrtGetStreamOverflowSwitch", [&] {
    abi::stream_of(stream);
    *flag = 0;
  });
}

VNPU_ACL(aclrtLaunchHostFunc, (aclrtStream stream, aclrtHostFunc function, void* argument)) {
  return guarded("aclrtLaunchHostFunc", [&] {
    executor().submit(abi::stream_of(stream), std::make_shared<HostFunction>(function, argument));
  });
}
VNPU_ACL(aclrtSubscribeReport, (uint64_t thread, aclrtStream stream)) {
  return guarded("aclrtSubscribeReport",
                 [&] { Reports::instance().subscribe(thread, abi::stream_of(stream).get()); });
}
VNPU_ACL(aclrtUnSubscribeReport, (uint64_t thread, aclrtStream stream)) {
  return guarded("aclrtUnSubscribeReport",
                 [&] { Reports::instance().unsubscribe(thread, abi::stream_of(stream).get()); });
}
VNPU_ACL(aclrtLaunchCallback, (aclrtCallback function, void* argument, aclrtCallbackBlockType block,
                               aclrtStream stream)) {
  return guarded("aclrtLaunchCallback", [&] {
    const StreamPtr& target = abi::stream_of(stream);
    if (!Reports::instance().subscribed(target.get())) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: no thread is subscribed to the stream of a callback; call "
                    "aclrtSubscribeReport first.");
    }
    executor().submit(target, std::make_shared<ReportedCallback>(
                                  function, argument, block == ACL_CALLBACK_BLOCK, target.get()));
  });
}
VNPU_ACL(aclrtProcessReport, (int32_t timeout_ms)) {
  constexpr aclError kReportTimeout = 507012;
  bool ran = false;
  const int status = guarded("aclrtProcessReport", [&] {
    const auto limit =
        timeout_ms < 0 ? std::chrono::hours(1) : std::chrono::milliseconds(timeout_ms);
    ran = Reports::instance().process(std::chrono::duration_cast<std::chrono::milliseconds>(limit));
  });
  return status != 0 || ran ? status : kReportTimeout;
}

VNPU_ACL(aclrtValueWait, (void* address, uint64_t value, uint32_t flag, aclrtStream stream)) {
  return guarded("aclrtValueWait", [&] {
    Memory::instance().check(address, sizeof(uint64_t), "aclrtValueWait");
    executor().submit(abi::stream_of(stream), std::make_shared<ValueWait>(address, value, flag));
  });
}
VNPU_ACL(aclrtValueWrite, (void* address, uint64_t value, uint32_t, aclrtStream stream)) {
  return guarded("aclrtValueWrite", [&] {
    Memory::instance().check(address, sizeof(uint64_t), "aclrtValueWrite");
    executor().submit(abi::stream_of(stream), std::make_shared<ValueWrite>(address, value));
  });
}
