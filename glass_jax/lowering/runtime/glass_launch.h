// Loads the kernels of a bundle and launches them on an NPU stream. Knows CANN's runtime and nothing of XLA.

#ifndef GLASS_LAUNCH_H_
#define GLASS_LAUNCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "acl/acl.h"

namespace glass {

// What the custom call says about a kernel, apart from its buffers.
struct KernelLaunch {
  std::string kernel;          // sha256 of the source: the kernel is the file <kernel>.o on GLASS_KERNEL_PATH
  std::string entry;           // name of the kernel function
  std::string arch;            // architecture it was generated for, for error messages
  int64_t block_dim;           // number of blocks
  int64_t dynamic_ub_bytes;    // unified buffer to reserve
  std::vector<int64_t> order;  // positions in `buffers`, in the order in which the kernel function takes them
};

// Enqueues `launch` on `stream`; `buffers` are device addresses. Returns an empty string, or what went wrong and what
// to do. Thread-safe; a kernel is loaded once a device.
std::string Launch(const KernelLaunch& launch, const std::vector<void*>& buffers, aclrtStream stream);

}  // namespace glass

#endif  // GLASS_LAUNCH_H_
