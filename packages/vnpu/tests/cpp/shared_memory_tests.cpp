#include "device/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>

#include "device/event.h"
#include "device/failure.h"
#include "failures.h"

namespace vnpu {
namespace {

using tests::message_of;

constexpr size_t kBytes = size_t{3} << 20;

char* at(void* address) { return static_cast<char*>(address); }

// Exit status of another process that runs this; 99 for an exception.
int in_child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    int status = 99;
    try {
      status = body();
    } catch (...) {
    }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(SharedMemory, AllocationsBesideItStayTheirOwn) {
  Memory& memory = Memory::instance();
  SharedMemory& shared = SharedMemory::instance();
  void* before = memory.allocate(0, 512);
  void* a = memory.allocate(0, 5000);
  void* after = memory.allocate(0, 512);
  *memory.backing(at(before) + 511) = 1;
  *memory.backing(at(after)) = 2;
  const std::string key = shared.export_key(a, 5000, true);
  EXPECT_EQ(*memory.backing(at(before) + 511), 1);
  EXPECT_EQ(*memory.backing(at(after)), 2);
  for (void* each : {before, a, after}) memory.release(each);
}

TEST(SharedMemory, ZeroedMemoryIsZeroWhereItIsImported) {
  Memory& memory = Memory::instance();
  SharedMemory& shared = SharedMemory::instance();
  void* a = memory.allocate(0, kBytes);
  std::memset(memory.backing(at(a)), 3, kBytes);
  const std::string key = shared.export_key(a, kBytes, true);
  char* imported = memory.backing(at(shared.import(key)));
  memory.zero(a, kBytes);
  for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(imported[i], 0) << i;
  shared.close(key);
  memory.release(a);
}

TEST(SharedMemory, FreedRoomIsPrivateAgain) {
  Memory& memory = Memory::instance();
  SharedMemory& shared = SharedMemory::instance();
  const size_t free_before = memory.free_bytes(1);
  void* a = memory.allocate(1, kBytes);
  char* bytes = memory.backing(at(a));
  const std::string key = shared.export_key(a, kBytes, true);
  char* imported = memory.backing(at(shared.import(key)));
  memory.release(a);
  bytes[0] = 4;  // whoever has the room next
  EXPECT_EQ(imported[0], 0);
  shared.close(key);
  EXPECT_EQ(memory.free_bytes(1), free_before);
  EXPECT_NE(message_of([&] { shared.import(key); }).find("it was freed there"), std::string::npos);
  EXPECT_NE(message_of([&] { shared.close(key); }).find("has freed it"), std::string::npos);
}

TEST(SharedMemory, AClosedImportIsNoMemoryAnyMore) {
  Memory& memory = Memory::instance();
  SharedMemory& shared = SharedMemory::instance();
  void* a = memory.allocate(0, kBytes);
  const std::string key = shared.export_key(a, 100, true);
  void* imported = shared.import(key);
  EXPECT_EQ(shared.import(key), imported);
  EXPECT_TRUE(memory.is_live(imported, kBytes));
  EXPECT_THROW(memory.release(imported), Failure);
  EXPECT_EQ(shared.last_import(key), nullptr);
  shared.close(key);
  EXPECT_EQ(shared.last_import(key), imported);
  shared.close(key);
  EXPECT_FALSE(memory.is_live(imported, 1));
  shared.close(key);  // the export
  EXPECT_NE(message_of([&] { shared.import(key); }).find("was closed"), std::string::npos);
  EXPECT_EQ(shared.export_key(a, 100, true), key);
  EXPECT_NO_THROW(shared.import(key));
  shared.close(key);
  memory.release(a);
}

TEST(SharedMemory, OnlyNamedProcessesImport) {
  Memory& memory = Memory::instance();
  SharedMemory& shared = SharedMemory::instance();
  void* a = memory.allocate(0, kBytes);
  const std::string key = shared.export_key(a, kBytes, false);
  const std::string text = message_of([&] { shared.import(key); });
  EXPECT_NE(text.find("aclrtIpcMemSetImportPid"), std::string::npos) << text;
  EXPECT_NE(text.find(std::to_string(::getpid())), std::string::npos) << text;
  shared.allow(key, {1, ::getpid()});
  EXPECT_NO_THROW(shared.import(key));
  shared.close(key);
  EXPECT_EQ(in_child([&] { return shared.import(key) != nullptr ? 0 : 1; }), 99);
  EXPECT_THROW(shared.allow(key, std::vector<pid_t>(SharedMemory::kMostProcesses, 1)), Failure);
  memory.release(a);
}

TEST(SharedMemory, WhatCannotBeExportedIsNamed) {
  Memory& memory = Memory::instance();
  SharedMemory& shared = SharedMemory::instance();
  void* a = memory.allocate(0, kBytes);
  void* small = memory.allocate(0, 512);
  EXPECT_NE(message_of([&] { shared.export_key(at(a) + 512, 1, true); }).find("byte 512 of"),
            std::string::npos);
  EXPECT_NE(message_of([&] { shared.export_key(a, kBytes + 1, true); }).find("3145729 bytes of"),
            std::string::npos);
  EXPECT_NE(message_of([&] { shared.export_key(small, 1, true); }).find("whole pages"),
            std::string::npos);
  EXPECT_NE(message_of([&] { shared.import("vnpu-memory-1"); }).find("is no key"),
            std::string::npos);
  EXPECT_NE(message_of([&] { shared.close("vnpu-memory-1"); }).find("has not exported"),
            std::string::npos);
  memory.release(small);
  memory.release(a);
}

// --- events
// ---------------------------------------------------------------------------------------

TEST(SharedEvent, AFailureOrAnEndOfTheOtherProcessIsToldHere) {
  Event event(64, Event::Holds::kNone, SharedRecords::create());
  const uint64_t identity = event.shared->identity;
  EXPECT_EQ(in_child([&] {
              Event opened(64, Event::Holds::kNone, SharedRecords::open(identity));
              opened.complete(opened.add_record(), Failure(FailureKind::kInternal, "x"));
              opened.add_record();  // and ends
              return 0;
            }),
            0);
  EXPECT_TRUE(event.reached(1));
  EXPECT_NE(message_of([&] { event.throw_if_failed(1); }).find("failed there"), std::string::npos);
  EXPECT_FALSE(event.reached(2));
  EXPECT_TRUE(event.is_abandoned(2));
  EXPECT_NE(message_of([&] { event.throw_if_failed(2); }).find("has ended"), std::string::npos);
}

TEST(SharedEvent, AnotherHandleIsRefused) {
  const auto records = SharedRecords::create();
  EXPECT_THROW(SharedRecords::open(records->identity + 1), Failure);
  const auto physical = Memory::instance().create_physical(0, Memory::kPage);
  EXPECT_NE(message_of([&] { SharedRecords::open(physical->identity); }).find("an event's handle"),
            std::string::npos);
}

}  // namespace
}  // namespace vnpu
