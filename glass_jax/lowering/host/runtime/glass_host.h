/* How a process calls a generated kernel that was compiled for this machine. Every kernel's shared object exports
 * glass_host_launch; all else of the runtime is its own business. Plain C, so that ctypes and other languages can call
 * it. */
#ifndef GLASS_HOST_H_
#define GLASS_HOST_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GLASS_HOST_ABI 1

/* An array in global memory, or a scalar parameter (then data points to its value). */
typedef struct {
  const char* name;
  void* data;
  uint64_t bytes;
  uint32_t result; /* 1: none of its bytes counts as written when the kernel starts */
} GlassHostBuffer;

/* The order in which pipes that could go do go. A kernel without races gives the same bits under all. */
enum { GLASS_HOST_BY_TURNS = 0, GLASS_HOST_RANDOM = 1, GLASS_HOST_LOADS_FIRST = 2, GLASS_HOST_LOADS_LAST = 3 };

/* What is looked for besides values. Without any of them a launch is fastest. */
enum { GLASS_HOST_RACES = 1, GLASS_HOST_BOUNDS = 2, GLASS_HOST_UNWRITTEN = 4 };

typedef struct {
  uint32_t abi;                   /* GLASS_HOST_ABI */
  const GlassHostBuffer* buffers; /* one for each parameter of the generated function, in its order */
  uint32_t num_buffers;
  uint32_t block_dim;
  uint32_t dynamic_ub_bytes;
  uint32_t policy;
  uint64_t seed; /* of the random policy */
  uint32_t checks;
  uint32_t threads; /* blocks are shared among at most this many threads; what comes out does not depend on it */
  /* Called after the last block, in the caller's thread, once for each kind of finding: one JSON object with "rule" and
   * "what" (a sentence), and where they apply "pipe", "other_pipe", "memory", "core", "block", "begin", "end" (bytes),
   * "line", "other_line" (of the generated source) and "count" (how often it was met; the rest tells of the first). */
  void (*report)(void* context, const char* finding);
  void* context;
} GlassHostLaunch;

/* 0: the kernel ran to its end (findings may say that it should not have). 1: it did not; the findings say why. */
int glass_host_launch(const GlassHostLaunch* launch);

#ifdef __cplusplus
}
#endif
#endif /* GLASS_HOST_H_ */
