// The bytes that calls read and write, and the checks that stand before them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "machine.h"

namespace glass {

// The on-chip memories of a block, 0xff wherever nothing was written: NaN in every float type.
class Memory {
 public:
  explicit Memory(bool flags);
  void poison();  // makes it as new: what the block before wrote is gone
  uint8_t* data(Space space) const { return data_[space].get(); }
  Bytes at(Space space, size_t offset) {
    return {data_[space].get() + offset, flags_ ? unwritten_[space].get() + offset : nullptr};
  }
  Shadow& shadow(Space space) { return shadows_[space]; }
  void wrote(Space space, size_t begin, size_t end) {
    if (begin < low_[space]) low_[space] = begin;
    if (end > high_[space]) high_[space] = end;
  }

 private:
  bool flags_;
  std::unique_ptr<uint8_t[]> data_[kSpaces], unwritten_[kSpaces];
  Shadow shadows_[kSpaces];
  size_t low_[kSpaces], high_[kSpaces];  // what was written lies between
};

// The `size` bytes of a memory from `pointer`, which generated code either counts from 0 or, for UB, takes from
// ub_base(). Out of bounds: a finding, and bytes that belong to nobody. Writing clears the flags only if the caller
// does.
Bytes on_chip(Space space, const void* pointer, size_t size, Access access);

// The same for an array in global memory, which is where the caller of the kernel put it.
Bytes in_global(const void* pointer, size_t size, Access access);

// The array that holds some bytes, or, if none does, the one that they lie behind.
struct InArray {
  uint32_t buffer;
  int64_t offset;
  bool inside;
};
InArray locate(const void* pointer, size_t size);

// Copies bytes and flags. Into global memory: a finding for bytes that nobody wrote.
void move(Bytes to, Bytes from, size_t size);
void move_out(Bytes to, Bytes from, size_t size, Space space, const void* pointer);
void check_move_out(Bytes from, size_t size, Space space, const void* pointer);
void check_written(Bytes bytes, size_t size, const char* memory, int64_t offset, const char* does);
inline void mark_written(Bytes to, size_t size) {
  if (to.unwritten != nullptr) std::memset(to.unwritten, 0, size);
}
// Whether any of the bytes is flagged.
inline bool any_unwritten(Bytes bytes, size_t size) {
  return bytes.unwritten != nullptr && std::memchr(bytes.unwritten, 1, size) != nullptr;
}

// UB of the vector core that runs; what the cube core calls UB is that of the first.
Space own_ub();

}  // namespace glass
