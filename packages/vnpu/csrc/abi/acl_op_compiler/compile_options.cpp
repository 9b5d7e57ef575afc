// libacl_op_compiler: compile options, system parameters, and the older way to run an operator.

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <string>
#include <string_view>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/legacy.h"
#include "acl/acl_op_compiler.h"
#include "interface/legacy_call.h"
#include "operators_absent.h"

using vnpu::FailureKind;

namespace {

constexpr size_t kOptionBytes = 64;
std::atomic<int64_t> parameters[8];

// A function of libopapi; null if that library is not loaded. Opening the device loads it.
template <class Function>
Function* in_opapi(const char* name) {
  void* const operators = ::dlopen("libopapi.so", RTLD_LAZY | RTLD_NOLOAD);
  return operators == nullptr ? nullptr : reinterpret_cast<Function*>(::dlsym(operators, name));
}

const char* option(aclCompileOpt opt) {
  // "disable" sends every operator through aclnn; anything else would compile it just in time.
  return opt == ACL_OP_JIT_COMPILE ? "disable" : "";
}

// Returns the tier from libopapi's `vnpuTierOf`, or the key that lists the type in the table
// `{"T1": ["Name", ...], ...}` of absent operators.
std::string tier_of(const char* type) {
  if (auto* const tier = in_opapi<const char*(const char*)>("vnpuTierOf")) {
    if (const char* const declared = tier(type)) return std::string("tier ") + declared;
  }
  constexpr std::string_view table = vnpu::abi::kAbsentOperators;
  const size_t listed = table.find('"' + std::string(type) + '"');
  if (listed == std::string_view::npos) return "in no tier: no model is known to need it";
  const size_t key_end = table.rfind("\": [", listed);
  const size_t key = table.rfind('"', key_end - 1) + 1;
  return "tier " + std::string(table.substr(key, key_end - key));
}

aclError no_such_operator(const char* type) {
  return vnpu::abi::report(
      FailureKind::kNotSupported,
      std::string("vnpu: operator '") + type + "' (" + tier_of(type) +
          ") has no aclnn implementation here, or none for tensors in private layouts, so "
          "torch_npu "
          "took its older route (aclop), which does not have it either. `vnpu coverage " +
          type + "` says what is missing; docs/guides/add_an_operator.md how to add it.");
}

vnpu::abi::LegacyTensor legacy(const aclTensorDesc* desc, const aclDataBuffer* buffer) {
  return {buffer->data, desc->type,         desc->storage_format,
          desc->dims,   desc->storage_dims, desc->placement != ACL_MEMTYPE_DEVICE};
}

aclError run(const char* type, int inputs, const aclTensorDesc* const* input_descs,
             const aclDataBuffer* const* input_buffers, int outputs,
             const aclTensorDesc* const* output_descs, aclDataBuffer* const* output_buffers,
             const aclopAttr* attributes, aclrtStream stream) {
  auto* const run_legacy = in_opapi<vnpu::abi::RunLegacy>("vnpuRunLegacy");
  if (run_legacy == nullptr) return no_such_operator(type);
  vnpu::abi::LegacyCall call{type, {}, {}, {}};
  for (int i = 0; i < inputs; ++i) {
    call.inputs.push_back(legacy(input_descs[i], input_buffers[i]));
  }
  for (int i = 0; i < outputs; ++i) {
    call.outputs.push_back(legacy(output_descs[i], output_buffers[i]));
  }
  if (attributes != nullptr) call.attributes = attributes->values;
  const int status = run_legacy(call, stream);
  return status == vnpu::abi::kNoSuchOperator ? no_such_operator(type) : status;
}

aclError parameter(aclSysParamOpt opt, const int64_t* write, int64_t* read) {
  const auto index = static_cast<size_t>(opt);
  if (index >= std::size(parameters)) {
    return vnpu::abi::report(FailureKind::kInvalidArgument, "vnpu: no such system parameter.");
  }
  if (write != nullptr) parameters[index].store(*write, std::memory_order_relaxed);
  if (read != nullptr) *read = parameters[index].load(std::memory_order_relaxed);
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) size_t aclGetCompileoptSize(aclCompileOpt) {
  return kOptionBytes;
}
VNPU_ACL(aclGetCompileopt, (aclCompileOpt opt, char* value, size_t bytes)) {
  std::memset(value, 0, bytes);
  std::strncpy(value, option(opt), bytes - 1);
  return 0;
}
VNPU_ACL(aclSetCompileopt, (aclCompileOpt opt, const char* value)) {
  if (opt == ACL_OP_JIT_COMPILE && std::strcmp(value, "disable") != 0) {
    return vnpu::abi::report(FailureKind::kNotSupported,
                             "vnpu: just-in-time compilation of operators is not available; leave "
                             "jit_compile off (torch.npu.set_compile_mode(jit_compile=False)).");
  }
  return 0;
}
VNPU_ACL(aclrtGetSysParamOpt, (aclSysParamOpt opt, int64_t* value)) {
  return parameter(opt, nullptr, value);
}
VNPU_ACL(aclrtSetSysParamOpt, (aclSysParamOpt opt, int64_t value)) {
  return parameter(opt, &value, nullptr);
}
VNPU_ACL(aclrtCtxSetSysParamOpt, (aclSysParamOpt opt, int64_t value)) {
  return parameter(opt, &value, nullptr);
}
VNPU_ACL(aclopCompileAndExecute,
         (const char* type, int inputs, const aclTensorDesc* const input_descs[],
          const aclDataBuffer* const input_buffers[], int outputs,
          const aclTensorDesc* const output_descs[], aclDataBuffer* const output_buffers[],
          const aclopAttr* attributes, aclopEngineType, aclopCompileType, const char*,
          aclrtStream stream)) {
  return run(type, inputs, input_descs, input_buffers, outputs, output_descs, output_buffers,
             attributes, stream);
}
VNPU_ACL(aclopCompileAndExecuteV2,
         (const char* type, int inputs, aclTensorDesc* input_descs[],
          aclDataBuffer* input_buffers[], int outputs, aclTensorDesc* output_descs[],
          aclDataBuffer* output_buffers[], aclopAttr* attributes, aclopEngineType, aclopCompileType,
          const char*, aclrtStream stream)) {
  return run(type, inputs, input_descs, input_buffers, outputs, output_descs, output_buffers,
             attributes, stream);
}
