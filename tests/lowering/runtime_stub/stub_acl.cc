// An NPU made of the host: a "device binary" is a shared library, a kernel function is called once a block with the
// array of its parameters. Keeps the last launch and counts loads, for the tests to look at.

#include <dlfcn.h>

#include <cstring>
#include <string>

#include "acl/acl.h"

using KernelFunction = void (*)(void** parameters, uint32_t block, uint32_t blocks);

struct StubState {
  uint32_t launches;
  uint32_t binaries_loaded;
  uint32_t functions_loaded;
  uint32_t block_dim;
  uint32_t dynamic_ub_bytes;
  uint32_t parameters;
  int32_t device;
  aclrtStream stream;
};

namespace {
StubState state{};
std::string failing;  // name of the function that fails
std::string message;
constexpr aclError kError = 507018;

aclError Fails(const char* function) {
  if (failing != function) return ACL_SUCCESS;
  message = std::string("stub: ") + function + " was told to fail";
  return kError;
}
}  // namespace

extern "C" {

StubState* stub_state() { return &state; }
void stub_reset() { state = StubState{}; }
void stub_fail(const char* function) { failing = function; }

const char* aclGetRecentErrMsg() { return message.empty() ? nullptr : message.c_str(); }

aclError aclrtGetDevice(int32_t* deviceId) {
  *deviceId = state.device;
  return Fails("aclrtGetDevice");
}

aclError aclrtBinaryLoadFromFile(const char* binPath, aclrtBinaryLoadOptions*, aclrtBinHandle* binHandle) {
  if (aclError code = Fails("aclrtBinaryLoadFromFile")) return code;
  if (binPath[0] != '/') return kError;
  ++state.binaries_loaded;
  *binHandle = dlopen(binPath, RTLD_NOW | RTLD_LOCAL);
  if (*binHandle == nullptr) message = dlerror();
  return *binHandle == nullptr ? kError : ACL_SUCCESS;
}

aclError aclrtBinaryGetFunction(const aclrtBinHandle binHandle, const char* kernelName, aclrtFuncHandle* funcHandle) {
  if (aclError code = Fails("aclrtBinaryGetFunction")) return code;
  ++state.functions_loaded;
  *funcHandle = dlsym(binHandle, kernelName);
  if (*funcHandle == nullptr) message = dlerror();
  return *funcHandle == nullptr ? kError : ACL_SUCCESS;
}

aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle funcHandle, uint32_t numBlocks, aclrtStream stream,
                                       aclrtLaunchKernelCfg* cfg, void* hostArgs, size_t argsSize,
                                       aclrtPlaceHolderInfo*, size_t) {
  if (aclError code = Fails("aclrtLaunchKernelWithHostArgs")) return code;
  ++state.launches;
  state.block_dim = numBlocks;
  state.stream = stream;
  state.parameters = argsSize / sizeof(void*);
  state.dynamic_ub_bytes = 0;
  for (size_t i = 0; cfg != nullptr && i < cfg->numAttrs; ++i) {
    const aclrtLaunchKernelAttr& attribute = cfg->attrs[i];
    if (attribute.id == ACL_RT_LAUNCH_KERNEL_ATTR_DYN_UBUF_SIZE) state.dynamic_ub_bytes = attribute.value.dynUBufSize;
  }
  KernelFunction kernel;
  std::memcpy(&kernel, &funcHandle, sizeof(kernel));
  for (uint32_t block = 0; block < numBlocks; ++block) kernel(static_cast<void**>(hostArgs), block, numBlocks);
  return ACL_SUCCESS;
}
}
