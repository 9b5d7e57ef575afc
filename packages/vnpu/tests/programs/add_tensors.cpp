// A program like CANN's own examples, linked with CANN's libraries, without Python and torch. Adds
// two tensors on device 0 and prints the sum, and a few facts.

#include <acl/acl.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// aclnn's headers come with CANN's toolkit. Source: hicann/ops-math math/add/docs/aclnnAdd.md.
extern "C" {
struct aclTensor;
struct aclScalar;
struct aclOpExecutor;
aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type,
                           const int64_t* strides, int64_t offset, aclFormat format,
                           const int64_t* storage_sizes, uint64_t storage_dims, void* data);
int aclDestroyTensor(const aclTensor* tensor);
aclScalar* aclCreateScalar(void* value, aclDataType type);
struct aclIntArray;
aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count);
int aclDestroyScalar(const aclScalar* scalar);
int aclnnAddGetWorkspaceSize(const aclTensor* self, const aclTensor* other, const aclScalar* alpha,
                             const aclTensor* out, uint64_t* bytes, aclOpExecutor** executor);
int aclnnAdd(void* workspace, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream);
}

namespace {

void check(int status, const char* what) {
  if (status == 0) return;
  std::fprintf(stderr, "%s returned %d: %s\n", what, status, aclGetRecentErrMsg());
  std::exit(1);
}

struct DeviceTensor {
  explicit DeviceTensor(const std::vector<float>& values)
      : size(static_cast<int64_t>(values.size())), bytes(values.size() * sizeof(float)) {
    check(aclrtMalloc(&data, bytes, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    check(aclrtMemcpy(data, bytes, values.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE), "aclrtMemcpy");
    const int64_t stride = 1;
    tensor = aclCreateTensor(&size, 1, ACL_FLOAT, &stride, 0, ACL_FORMAT_ND, &size, 1, data);
  }
  ~DeviceTensor() {
    aclDestroyTensor(tensor);
    aclDestroyTensor(tensor);  // as CANN's own examples do
    aclrtFree(data);
  }
  std::vector<float> values() const {
    std::vector<float> result(bytes / sizeof(float));
    check(aclrtMemcpy(result.data(), bytes, data, bytes, ACL_MEMCPY_DEVICE_TO_HOST), "aclrtMemcpy");
    return result;
  }

  int64_t size;
  size_t bytes;
  void* data = nullptr;
  aclTensor* tensor = nullptr;
};

}  // namespace

int main() {
  check(aclInit(nullptr), "aclInit");
  check(aclrtSetDevice(0), "aclrtSetDevice");
  aclrtStream stream = nullptr;
  check(aclrtCreateStream(&stream), "aclrtCreateStream");
  {
    const DeviceTensor first({1, 2, 3}), second({10, 20, 30}), sum({0, 0, 0});
    float alpha = 2;
    const aclScalar* scale = aclCreateScalar(&alpha, ACL_FLOAT);
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    check(
        aclnnAddGetWorkspaceSize(first.tensor, second.tensor, scale, sum.tensor, &bytes, &executor),
        "aclnnAddGetWorkspaceSize");
    void* workspace = nullptr;
    if (bytes > 0) check(aclrtMalloc(&workspace, bytes, ACL_MEM_MALLOC_HUGE_FIRST), "aclrtMalloc");
    check(aclnnAdd(workspace, bytes, executor, stream), "aclnnAdd");
    check(aclrtSynchronizeStream(stream), "aclrtSynchronizeStream");
    for (const float value : sum.values()) std::printf("%g ", value);
    std::printf("\n");
    if (workspace != nullptr) aclrtFree(workspace);
    aclDestroyScalar(scale);
  }
  aclrtRunMode mode = ACL_DEVICE;
  check(aclrtGetRunMode(&mode), "aclrtGetRunMode");
  std::printf("%d %zu %g\n", mode == ACL_HOST, aclDataTypeSize(ACL_BF16),
              aclFloat16ToFloat(aclFloatToFloat16(0.5f)));
  std::printf("%d\n", aclCreateIntArray(nullptr, 1) == nullptr);
  check(aclrtDestroyStream(stream), "aclrtDestroyStream");
  check(aclrtResetDevice(0), "aclrtResetDevice");
  check(aclFinalize(), "aclFinalize");
}
