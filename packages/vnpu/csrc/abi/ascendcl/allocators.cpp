// Allocators that programs register with streams. Nothing here allocates from one: models compiled
// ahead of time would, which a virtual NPU does not load.

#include <map>
#include <mutex>
#include <set>

#include "abi/ascendcl/declarations.h"
#include "acl/acl_rt_allocator.h"
#include "device/system.h"

using namespace vnpu;
using abi::guarded;

namespace {

struct Description {
  aclrtAllocator allocator = nullptr;
  aclrtAllocatorAllocFunc allocate = nullptr;
  aclrtAllocatorFreeFunc free = nullptr;
  aclrtAllocatorAllocAdviseFunc advise = nullptr;
  aclrtAllocatorGetAddrFromBlockFunc address_of = nullptr;
};

class Allocators {
 public:
  static Allocators& instance() {
    static Allocators* const all = new Allocators();
    return *all;
  }
  Description* create() {
    auto* const made = new Description();
    std::lock_guard lock(mutex_);
    known_.insert(made);
    return made;
  }
  void destroy(aclrtAllocatorDesc handle) {
    Description* const description = &of(handle);
    std::lock_guard lock(mutex_);
    known_.erase(description);
    delete description;
  }
  Description& of(aclrtAllocatorDesc handle) {
    auto* const description = static_cast<Description*>(handle);
    std::lock_guard lock(mutex_);
    if (known_.count(description) == 0) {
      throw Failure(FailureKind::kInvalidHandle,
                    "vnpu: no description of an allocator, or one that was destroyed; make one "
                    "with aclrtAllocatorCreateDesc.");
    }
    return *description;
  }
  void put(const Stream* stream, aclrtAllocatorDesc handle) {
    const Description copy = of(handle);
    if (copy.allocator == nullptr || copy.allocate == nullptr || copy.free == nullptr ||
        copy.address_of == nullptr) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: an allocator needs its object and its functions that allocate, free and "
                    "give a block's address before it is registered.");
    }
    std::lock_guard lock(mutex_);
    of_stream_[stream] = {handle, copy};
  }
  void remove(const Stream* stream) {
    std::lock_guard lock(mutex_);
    of_stream_.erase(stream);
  }
  std::pair<aclrtAllocatorDesc, Description> registered(const Stream* stream) {
    std::lock_guard lock(mutex_);
    const auto found = of_stream_.find(stream);
    if (found == of_stream_.end()) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: the stream has no allocator; call aclrtAllocatorRegister first.");
    }
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::set<Description*> known_;
  std::map<const Stream*, std::pair<aclrtAllocatorDesc, Description>> of_stream_;
};

template <class Member, class Value>
int set_in(const char* function, aclrtAllocatorDesc handle, Member member, Value value) {
  return guarded(function, [&] { Allocators::instance().of(handle).*member = value; });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) aclrtAllocatorDesc aclrtAllocatorCreateDesc() {
  return Allocators::instance().create();
}
VNPU_ACL(aclrtAllocatorDestroyDesc, (aclrtAllocatorDesc handle)) {
  return guarded("aclrtAllocatorDestroyDesc", [&] { Allocators::instance().destroy(handle); });
}
VNPU_ACL(aclrtAllocatorSetObjToDesc, (aclrtAllocatorDesc handle, aclrtAllocator allocator)) {
  return set_in("aclrtAllocatorSetObjToDesc", handle, &Description::allocator, allocator);
}
VNPU_ACL(aclrtAllocatorSetAllocFuncToDesc,
         (aclrtAllocatorDesc handle, aclrtAllocatorAllocFunc function)) {
  return set_in("aclrtAllocatorSetAllocFuncToDesc", handle, &Description::allocate, function);
}
VNPU_ACL(aclrtAllocatorSetFreeFuncToDesc,
         (aclrtAllocatorDesc handle, aclrtAllocatorFreeFunc function)) {
  return set_in("aclrtAllocatorSetFreeFuncToDesc", handle, &Description::free, function);
}
VNPU_ACL(aclrtAllocatorSetAllocAdviseFuncToDesc,
         (aclrtAllocatorDesc handle, aclrtAllocatorAllocAdviseFunc function)) {
  return set_in("aclrtAllocatorSetAllocAdviseFuncToDesc", handle, &Description::advise, function);
}
VNPU_ACL(aclrtAllocatorSetGetAddrFromBlockFuncToDesc,
         (aclrtAllocatorDesc handle, aclrtAllocatorGetAddrFromBlockFunc function)) {
  return set_in("aclrtAllocatorSetGetAddrFromBlockFuncToDesc", handle, &Description::address_of,
                function);
}
VNPU_ACL(aclrtAllocatorRegister, (aclrtStream stream, aclrtAllocatorDesc handle)) {
  return guarded("aclrtAllocatorRegister", [&] {
    if (stream == nullptr) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: an allocator is registered with a stream that was created, not with "
                    "the default one.");
    }
    Allocators::instance().put(abi::stream_of(stream).get(), handle);
  });
}
VNPU_ACL(aclrtAllocatorGetByStream,
         (aclrtStream stream, aclrtAllocatorDesc* handle, aclrtAllocator* allocator,
          aclrtAllocatorAllocFunc* allocate, aclrtAllocatorFreeFunc* free,
          aclrtAllocatorAllocAdviseFunc* advise, aclrtAllocatorGetAddrFromBlockFunc* address_of)) {
  return guarded("aclrtAllocatorGetByStream", [&] {
    const auto [found, description] =
        Allocators::instance().registered(abi::stream_of(stream).get());
    *handle = found;
    *allocator = description.allocator;
    *allocate = description.allocate;
    *free = description.free;
    *advise = description.advise;
    *address_of = description.address_of;
  });
}
VNPU_ACL(aclrtAllocatorUnregister, (aclrtStream stream)) {
  return guarded("aclrtAllocatorUnregister",
                 [&] { Allocators::instance().remove(abi::stream_of(stream).get()); });
}
