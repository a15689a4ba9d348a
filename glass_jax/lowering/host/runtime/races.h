// Accesses that nothing orders, whatever the schedule of this run was: vector clocks of pipes over shadow cells of memories.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "machine.h"
#include "memory.h"

namespace glass {

// Notes that the op which runs accesses these bytes, and reports an earlier access that it is not ordered after.
void touch(Space space, size_t offset, size_t size, Access access);
void touch_global(uint32_t buffer, size_t offset, size_t size, Access access);

// Begins with a block: no access to its on-chip memories so far.
void forget_accesses();

}  // namespace glass
