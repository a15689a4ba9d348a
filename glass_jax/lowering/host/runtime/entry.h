// What a kernel's own object code and the runtime know of each other.
#pragma once

#include <cstdint>

#include "glass_host.h"

namespace glass {

struct Kernel {
  const char* name;
  bool cube, vector;  // which cores it has work for
  bool together;      // blocks wait for each other: all of them must be there at once
  bool ordered;  // blocks update the same elements: one block after the other, or rounding would depend on the threads
  void (*entry)(void* const* arguments);
};

int run_kernel(const GlassHostLaunch* request, const Kernel& kernel);

enum class Access : uint8_t { kRead, kWrite, kUpdate, kAtomic };

// The UB of the core whose program runs, as an address that threads can use.
uint8_t* ub_base();

// A call of a region of vector code: what the vector pipe shall do when its turn comes, with the arguments of now.
void record_region(const char* name, void (*run)(const uint64_t* arguments), const uint64_t* arguments, int count);

}  // namespace glass

// The line of the generated source that runs, which the adapted source sets itself; and the block, which it reads.
extern __thread uint32_t glass_line __attribute__((tls_model("initial-exec")));
extern __thread int block_idx __attribute__((tls_model("initial-exec")));
