// Settings that all tests share; libvnpu reads them once per process.

#include <gtest/gtest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::setenv("VNPU_DEVICES", "2", 1);
  ::setenv("VNPU_MEMORY", "64MiB", 1);
  for (const char* name :
       {"VNPU_RACES", "VNPU_TRACE", "VNPU_PACE", "VNPU_SCHEDULE", "VNPU_COMPUTE", "VNPU_WAIT_LIMIT",
        "VNPU_TIMING", "VNPU_TIMELINE", "VNPU_PHANTOM_RANKS"}) {
    ::unsetenv(name);
  }
  return RUN_ALL_TESTS();
}
