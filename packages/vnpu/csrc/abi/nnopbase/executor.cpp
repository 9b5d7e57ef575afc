// libnnopbase: torch_npu looks up aclDestroyAclOpExecutor here.

struct aclOpExecutor;
extern "C" int vnpuDestroyExecutor(aclOpExecutor* executor);

extern "C" __attribute__((visibility("default"))) int aclDestroyAclOpExecutor(
    aclOpExecutor* executor) {
  return vnpuDestroyExecutor(executor);
}
