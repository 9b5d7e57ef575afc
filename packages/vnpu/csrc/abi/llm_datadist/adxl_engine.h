#pragma once

// What programs find in libllm_datadist: engines that read and write each other's memory. The
// torch_npu wheel has no header of it.
// Source: gitcode.com/cann/hixl include/adxl/adxl_engine.h and adxl_types.h.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "abi/metadef/ascend_string.h"

namespace adxl {

using ge::AscendString;
using Status = uint32_t;
using MemHandle = void*;

constexpr Status SUCCESS = 0;
constexpr Status PARAM_INVALID = 103900;
constexpr Status TIMEOUT = 103901;
constexpr Status NOT_CONNECTED = 103902;
constexpr Status ALREADY_CONNECTED = 103903;
constexpr Status FAILED = 503900;

enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };

struct MemDesc {
  uintptr_t addr;
  size_t len;
  uint8_t reserved[128];
};

struct TransferOpDesc {
  uintptr_t local_addr;
  uintptr_t remote_addr;
  size_t len;
};

// Exported: what it does. Programs ask for the others, such as TransferAsync, as weak symbols.
class __attribute__((visibility("default"))) AdxlEngine {
 public:
  AdxlEngine();
  ~AdxlEngine();
  // engine: "address:port", under which others connect
  Status Initialize(const AscendString& engine,
                    const std::map<AscendString, AscendString>& options);
  void Finalize();
  // Others may read and write it from now on.
  Status RegisterMem(const MemDesc& memory, MemType type, MemHandle& handle);
  Status DeregisterMem(MemHandle handle);
  Status Connect(const AscendString& remote, int32_t timeout_ms);
  Status Disconnect(const AscendString& remote, int32_t timeout_ms);
  Status TransferSync(const AscendString& remote, TransferOp operation,
                      const std::vector<TransferOpDesc>& pieces, int32_t timeout_ms);

 private:
  class AdxlEngineImpl;
  std::unique_ptr<AdxlEngineImpl> impl_;
};

}  // namespace adxl
