// Two engines of one process read and write each other's memory. Prints each status and value.

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "abi/llm_datadist/adxl_engine.h"
#include "abi/llm_datadist/socket.h"
#include "acl/acl.h"

using namespace adxl;

namespace {

constexpr size_t kBytes = 1 << 20;

MemDesc described(const void* memory, size_t bytes) {
  return {reinterpret_cast<uintptr_t>(memory), bytes, {}};
}

TransferOpDesc piece(const void* here, const void* there, size_t bytes) {
  return {reinterpret_cast<uintptr_t>(here), reinterpret_cast<uintptr_t>(there), bytes};
}

// An engine of this name that takes what it is asked for, and never answers.
void be_silent(const std::string& name, int limit_ms) {
  const auto listening = vnpu::transfer::Socket::listen(name);
  const auto asks = listening.accept();
  std::this_thread::sleep_for(std::chrono::milliseconds(limit_ms));
}

}  // namespace

int main() {
  aclInit(nullptr);
  aclrtSetDevice(0);
  void* device = nullptr;
  aclrtMalloc(&device, kBytes, ACL_MEM_MALLOC_HUGE_FIRST);
  std::vector<char> host(kBytes, 'h'), seen(8, ' ');
  const std::string at = std::to_string(getpid());
  const std::string first = "127.0.0.1:1" + at, second = "127.0.0.1:2" + at,
                    third = "127.0.0.1:3" + at;

  AdxlEngine one, other, same;
  MemHandle mine = nullptr, theirs = nullptr, wrong = nullptr;
  std::printf("%u %u\n", one.Initialize(first.c_str(), {}), other.Initialize(second.c_str(), {}));
  std::printf("taken %u\n", same.Initialize(first.c_str(), {}));
  std::printf("%u %u\n", one.RegisterMem(described(host.data(), kBytes), MEM_HOST, mine),
              other.RegisterMem(described(device, kBytes / 2), MEM_DEVICE, theirs));
  std::printf("not a device's %u\n",
              one.RegisterMem(described(host.data(), kBytes), MEM_DEVICE, wrong));

  const std::vector<TransferOpDesc> pieces = {
      piece(host.data(), device, 5), piece(host.data() + 9, static_cast<char*>(device) + 6, 2)};
  std::printf("not connected %u\n", one.TransferSync(second.c_str(), WRITE, pieces, 5000));
  std::printf("absent %u\n", one.Connect("127.0.0.1:absent", 1000));
  std::printf("%u\n", one.Connect(second.c_str(), 1000));
  std::printf("again %u\n", one.Connect(second.c_str(), 1000));
  std::printf("%u\n", one.TransferSync(second.c_str(), WRITE, pieces, 5000));
  aclrtMemcpy(seen.data(), 8, device, 8, ACL_MEMCPY_DEVICE_TO_HOST);
  std::printf("%.5s %.2s %d\n", seen.data(), seen.data() + 6, seen[5]);

  const char text[] = "device";
  aclrtMemcpy(device, 6, text, 6, ACL_MEMCPY_HOST_TO_DEVICE);
  std::printf("%u\n",
              one.TransferSync(second.c_str(), READ, {piece(host.data() + 20, device, 6)}, 5000));
  std::printf("%.8s\n", host.data() + 19);

  const char* const last = static_cast<char*>(device) + kBytes / 2 - 4;
  std::printf("beyond %u\n",
              one.TransferSync(second.c_str(), READ, {piece(host.data(), last, 8)}, 5000));
  one.Connect(second.c_str(), 1000);  // a refusal ends it
  std::printf("from elsewhere %u\n",
              one.TransferSync(second.c_str(), READ, {piece(seen.data(), device, 8)}, 5000));
  std::printf("%u\n", other.DeregisterMem(theirs));
  std::printf("%u\n", other.DeregisterMem(theirs));
  std::printf("given up %u\n", one.TransferSync(second.c_str(), READ, pieces, 5000));

  std::thread silent(be_silent, third, 3000);
  while (one.Connect(third.c_str(), 1000) != SUCCESS) std::this_thread::yield();
  std::printf("late %u\n", one.TransferSync(third.c_str(), READ, pieces, 200));
  silent.join();
  one.Connect(second.c_str(), 1000);
  other.Finalize();
  std::printf("ended %u\n", one.TransferSync(second.c_str(), READ, pieces, 5000));
  one.Finalize();
  return 0;
}
