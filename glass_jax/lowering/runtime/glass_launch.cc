// Prototypes, and what each function expects, are those of CANN's Runtime API reference, "Kernel loading and execution"
// (https://www.hiascend.com/document/detail/en/CANNCommunityEdition/910/API/runtimeapi/aclcppdevg_03_0145.html):
// aclrtBinaryLoadFromFile (absolute path), aclrtBinaryGetFunction (a handle belongs to the current device),
// aclrtLaunchKernelWithHostArgs (asynchronous; parameters laid out as in the kernel's signature, 8 bytes an address).

#include "glass_launch.h"

#include <climits>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

namespace glass {
namespace {

constexpr char kPathVariable[] = "GLASS_KERNEL_PATH";

// What `function` reports when it fails with `code`.
std::string AclFailure(const std::string& function, aclError code, const std::string& detail) {
  const char* message = aclGetRecentErrMsg();
  return function + " failed with ACL error " + std::to_string(code) + " " + detail +
         (message == nullptr ? "" : std::string(": ") + message);
}

bool IsSha256(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// Absolute path of the compiled kernel, or an empty string.
std::string FindBinary(const std::string& kernel, const char* folders) {
  std::istringstream stream(folders);
  for (std::string folder; std::getline(stream, folder, ':');) {
    char absolute[PATH_MAX];
    if (realpath((folder + "/" + kernel + ".o").c_str(), absolute) != nullptr) return absolute;
  }
  return "";
}

struct Binary {
  aclrtBinHandle handle = nullptr;
  std::map<std::string, aclrtFuncHandle> functions;
};

// Loaded kernels live as long as the process: compiled programs refer to them.
std::mutex mutex;
std::map<std::pair<int32_t, std::string>, Binary> binaries;

// Sets `function` to the kernel function on the current device.
std::string LoadFunction(const KernelLaunch& launch, aclrtFuncHandle* function) {
  if (!IsSha256(launch.kernel)) return "the attribute kernel is not a sha256: '" + launch.kernel + "'";
  int32_t device = 0;
  if (aclError code = aclrtGetDevice(&device); code != ACL_SUCCESS) {
    return AclFailure("aclrtGetDevice", code, "(no device is set on this thread)");
  }
  std::lock_guard<std::mutex> lock(mutex);
  Binary& binary = binaries[{device, launch.kernel}];
  if (binary.handle == nullptr) {
    const char* folders = std::getenv(kPathVariable);
    if (folders == nullptr) folders = "";
    const std::string path = FindBinary(launch.kernel, folders);
    if (path.empty()) {
      return "no file " + launch.kernel + ".o for kernel " + launch.entry + " (" + launch.arch + ") on " +
             kPathVariable + "='" + folders + "': run `make -C <bundle>/runtime kernels` and set " +
             kPathVariable + "=<bundle>/kernels";
    }
    if (aclError code = aclrtBinaryLoadFromFile(path.c_str(), nullptr, &binary.handle); code != ACL_SUCCESS) {
      binary.handle = nullptr;
      return AclFailure("aclrtBinaryLoadFromFile", code, "for " + path + ", generated for " + launch.arch);
    }
  }
  aclrtFuncHandle& known = binary.functions[launch.entry];
  if (known == nullptr) {
    if (aclError code = aclrtBinaryGetFunction(binary.handle, launch.entry.c_str(), &known); code != ACL_SUCCESS) {
      known = nullptr;
      return AclFailure("aclrtBinaryGetFunction", code, "for " + launch.entry + " in " + launch.kernel + ".o");
    }
  }
  *function = known;
  return "";
}

// The kernel function's parameters, in its own order.
std::string OrderArguments(const KernelLaunch& launch, const std::vector<void*>& buffers,
                           std::vector<void*>* arguments) {
  if (launch.order.size() != buffers.size()) {
    return "launch_order has " + std::to_string(launch.order.size()) + " entries for " +
           std::to_string(buffers.size()) + " buffers of kernel " + launch.entry;
  }
  std::vector<bool> used(buffers.size(), false);
  for (int64_t position : launch.order) {
    if (position < 0 || position >= static_cast<int64_t>(buffers.size()) || used[position]) {
      return "launch_order of kernel " + launch.entry + " is not a permutation of its " +
             std::to_string(buffers.size()) + " buffers: entry " + std::to_string(position);
    }
    used[position] = true;
    arguments->push_back(buffers[position]);
  }
  return "";
}

bool FitsUint32(int64_t value, int64_t least) {
  return value >= least && value <= std::numeric_limits<uint32_t>::max();
}

}  // namespace

std::string Launch(const KernelLaunch& launch, const std::vector<void*>& buffers, aclrtStream stream) {
  if (!FitsUint32(launch.block_dim, 1)) {
    return "block_dim=" + std::to_string(launch.block_dim) + " is not a number of blocks";
  }
  if (!FitsUint32(launch.dynamic_ub_bytes, 0)) {
    return "dynamic_ub_bytes=" + std::to_string(launch.dynamic_ub_bytes) + " is not a size";
  }
  std::vector<void*> arguments;
  if (std::string error = OrderArguments(launch, buffers, &arguments); !error.empty()) return error;
  aclrtFuncHandle function = nullptr;
  if (std::string error = LoadFunction(launch, &function); !error.empty()) return error;

  aclrtLaunchKernelAttr attribute{};
  attribute.id = ACL_RT_LAUNCH_KERNEL_ATTR_DYN_UBUF_SIZE;
  attribute.value.dynUBufSize = static_cast<uint32_t>(launch.dynamic_ub_bytes);
  aclrtLaunchKernelCfg config{};
  config.attrs = &attribute;
  config.numAttrs = 1;
  const aclError code = aclrtLaunchKernelWithHostArgs(
      function, static_cast<uint32_t>(launch.block_dim), stream, launch.dynamic_ub_bytes == 0 ? nullptr : &config,
      arguments.data(), arguments.size() * sizeof(void*), nullptr, 0);
  if (code == ACL_SUCCESS) return "";
  return AclFailure("aclrtLaunchKernelWithHostArgs", code,
                    "for " + launch.entry + " (" + launch.arch + "), " + std::to_string(launch.block_dim) +
                        " blocks, " + std::to_string(launch.dynamic_ub_bytes) + " bytes of unified buffer");
}

}  // namespace glass
