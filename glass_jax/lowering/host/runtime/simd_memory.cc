// Registers to and from UB.
#include "machine.h"
#include "memory.h"
#include "simd_lanes.h"

namespace glass {
namespace {

const char* at_offset(const void* pointer, int64_t bytes) {
  return reinterpret_cast<const char*>(reinterpret_cast<intptr_t>(pointer) + bytes);
}

Bytes ub(const void* at, size_t size, Access access) { return on_chip(own_ub(), at, size, access); }

// Memory to `size` bytes of a register, with flags.
void take(Register& d, int to, Bytes from, size_t offset, int size) {
  std::memcpy(d.bytes + to, from.data + offset, size);
  if (from.unwritten == nullptr) return;
  for (int i = 0; i < size; ++i)
    if (from.unwritten[offset + i] != 0) set_bits(d.unwritten, to + i, 1, true);
}

void put(const void* to, const Register& a, int from, int size) {
  const Bytes target = ub(to, size, Access::kWrite);
  std::memcpy(target.data, a.bytes + from, size);
  if (target.unwritten == nullptr) return;
  for (int i = 0; i < size; ++i) target.unwritten[i] = bit(a.unwritten, from + i);
}

}  // namespace

void load(Register& d, const void* from, int size, Load distribution) {
  Register result;
  std::memset(result.unwritten, 0, sizeof result.unwritten);
  switch (distribution) {
    case Load::kNormal: take(result, 0, ub(from, 256, Access::kRead), 0, 256); break;
    case Load::kBroadcast: {
      const Bytes bytes = ub(from, size, Access::kRead);
      for (int i = 0; i < 256; i += size) take(result, i, bytes, 0, size);
      break;
    }
    case Load::kUpsample: {
      const Bytes bytes = ub(from, 128, Access::kRead);
      for (int i = 0; i < 256; i += size) take(result, i, bytes, i / (2 * size) * size, size);
      break;
    }
    case Load::kDownsample: {
      const Bytes bytes = ub(from, 512, Access::kRead);
      for (int i = 0; i < 256; i += size) take(result, i, bytes, 2 * i, size);
      break;
    }
    case Load::kUnpack:
    case Load::kUnpack4: {
      const int ratio = distribution == Load::kUnpack ? 2 : 4;
      const Bytes bytes = ub(from, 256 / ratio, Access::kRead);
      std::memset(result.bytes, 0, sizeof result.bytes);
      for (int i = 0; i < 256 / ratio; i += size) take(result, i * ratio, bytes, i, size);
      break;
    }
    case Load::kBroadcastBlock: {
      const Bytes bytes = ub(from, 32, Access::kRead);
      for (int i = 0; i < 256; i += 32) take(result, i, bytes, 0, 32);
      break;
    }
    case Load::kElementToBlock: {
      const Bytes bytes = ub(from, 8 * size, Access::kRead);
      for (int i = 0; i < 256; i += size) take(result, i, bytes, i / 32 * size, size);
      break;
    }
  }
  d = result;
}

void load_deinterleaved(Register& d0, Register& d1, const void* from, int size) {
  Register low, high;
  load(low, from, size, Load::kNormal);
  load(high, at_offset(from, 256), size, Load::kNormal);
  deinterleave(d0, d1, low, high, size);
}

// Eight blocks, each at its own offset in bytes. A block is read if the mask selects any of it.
void load_blocks(Register& d, const void* from, const Register& index, const Mask* m) {
  Register result;
  clear(result);
  for (int block = 0; block < 8; ++block) {
    const uint32_t chosen = m == nullptr ? ~0u : static_cast<uint32_t>(m->bits[block / 2] >> (block % 2 * 32));
    if (chosen == 0) continue;
    uint32_t offset;
    std::memcpy(&offset, index.bytes + 4 * block, 4);
    take(result, 32 * block, ub(at_offset(from, offset), 32, Access::kRead), 0, 32);
    if (bit(index.unwritten, 4 * block)) set_bits(result.unwritten, 32 * block, 32, true);
  }
  d = result;
}

void load_indexed(Register& d, const void* from, const Register& index, const Mask& m, int size, int index_size,
                  int lane_size) {
  Register result;
  clear(result);
  for (int i = 0; i < 256 / lane_size; ++i) {
    if (!m.at(i * lane_size)) continue;
    uint32_t element = 0;
    std::memcpy(&element, index.bytes + i * index_size, index_size);
    take(result, i * lane_size, ub(at_offset(from, int64_t{element} * size), size, Access::kRead), 0, size);
    if (bit(index.unwritten, i * index_size) || bit(m.unwritten, i * lane_size))
      set_bits(result.unwritten, i * lane_size, lane_size, true);
  }
  d = result;
}

void store(void* to, const Register& a, const Mask& m, int size, Store distribution) {
  switch (distribution) {
    case Store::kFirst: return put(to, a, 0, size);
    case Store::kPack:
    case Store::kPackQuarter: {
      const int narrow = distribution == Store::kPack ? size / 2 : 1;
      for (int i = 0; i < 256 / size; ++i)
        if (m.at(i * size)) put(at_offset(to, i * narrow), a, i * size, narrow);
      return;
    }
    case Store::kNormal:
      // Runs of lanes that are stored go at once.
      for (int i = 0; i < 256;) {
        if (!m.at(i)) {
          i += size;
          continue;
        }
        int end = i + size;
        while (end < 256 && m.at(end)) end += size;
        put(at_offset(to, i), a, i, end - i);
        i = end;
      }
  }
}

void store_blocks(void* to, const Register& a, const Mask& m, int size, uint16_t block_stride) {
  for (int i = 0; i < 256; i += size)
    if (m.at(i)) put(at_offset(to, int64_t{i} / 32 * block_stride * 32 + i % 32), a, i, size);
}

// Of bytes only those at even places are stored.
void store_indexed(void* to, const Register& a, const Register& index, const Mask& m, int size, int index_size) {
  const int lane = std::max(size, 2);
  for (int i = 0; i < 256 / lane; ++i) {
    if (!m.at(i * lane)) continue;
    uint32_t element = 0;
    std::memcpy(&element, index.bytes + i * index_size, index_size);
    put(at_offset(to, int64_t{element} * size), a, i * lane, size);
  }
}

namespace {
// Masks lie in memory as 32 bytes. Sparse ones take every second bit, or give each bit twice.
void load_mask(Mask& d, const void* from, int bytes, int multiple, int step) {
  const Bytes source = ub(from, bytes, Access::kRead);
  Mask result{};
  for (int i = 0; i < 256; ++i) {
    const int at = i / multiple * step;
    result.set(i, source.data[at / 8] >> (at % 8) & 1);
    if (source.unwritten != nullptr && source.unwritten[at / 8] != 0) set_bits(result.unwritten, i, 1, true);
  }
  d = result;
}
void store_mask(const void* to, const Mask& a, int bytes, int step) {
  const Bytes target = ub(to, bytes, Access::kWrite);
  std::memset(target.data, 0, bytes);
  mark_written(target, bytes);
  for (int i = 0; i < bytes * 8; ++i) {
    target.data[i / 8] = static_cast<uint8_t>(target.data[i / 8] | a.at(i * step) << (i % 8));
    if (target.unwritten != nullptr && bit(a.unwritten, i * step)) target.unwritten[i / 8] = 1;
  }
}
}  // namespace

void asc_loadalign(Mask& d, const uint32_t* from, int32_t offset) { load_mask(d, from + offset, 32, 1, 1); }
void asc_loadalign_upsample(Mask& d, const uint32_t* from, int32_t offset) { load_mask(d, from + offset, 16, 2, 1); }
void asc_loadalign_downsample(Mask& d, const uint32_t* from, int32_t offset) { load_mask(d, from + offset, 64, 1, 2); }
void asc_storealign(uint32_t* to, const Mask& a, int32_t offset) { store_mask(to + offset, a, 32, 1); }
void asc_storealign_pack(uint32_t* to, const Mask& a, int32_t offset) { store_mask(to + offset, a, 16, 2); }

}  // namespace glass
