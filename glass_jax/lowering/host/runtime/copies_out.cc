// Copies to global memory, and out of L0C: conversions, relu, the halves of both vector cores, atomic updates.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "copies.h"
#include "findings.h"
#include "machine.h"
#include "memory.h"

namespace glass {
namespace {

enum Atomic { kNone, kAdd, kMax, kMin };

template <class T>
void update(uint8_t* to, const uint8_t* from, size_t size, int atomic) {
  for (size_t at = 0; at + sizeof(T) <= size; at += sizeof(T)) {
    T old, value;
    std::memcpy(&old, to + at, sizeof(T));
    std::memcpy(&value, from + at, sizeof(T));
    const T result = atomic == kAdd ? T(old + value) : (atomic == kMax) == (old < value) ? value : old;
    std::memcpy(to + at, &result, sizeof(T));
  }
}

// What a copy to global memory does with bytes: stores them, or updates elements by them.
void store_global(void* to, Bytes from, size_t size, Space space, const void* pointer, int atomic, Type type) {
  const Bytes target = in_global(to, size, atomic == kNone ? Access::kWrite : Access::kAtomic);
  if (atomic == kNone) return move_out(target, from, size, space, pointer);
  std::vector<uint8_t> values(from.data, from.data + size);
  switch (type) {
    case Type::kF32: update<float>(target.data, values.data(), size, atomic); break;
    case Type::kF16: update<half>(target.data, values.data(), size, atomic); break;
    case Type::kBF16: update<bfloat16_t>(target.data, values.data(), size, atomic); break;
    case Type::kS8: update<int8_t>(target.data, values.data(), size, atomic); break;
    case Type::kS16: update<int16_t>(target.data, values.data(), size, atomic); break;
    default: update<int32_t>(target.data, values.data(), size, atomic); break;
  }
  check_move_out(from, size, space, pointer);
}

// An element of L0C as another type. Quantization 0 keeps it; 1 makes it half and 16 bfloat16 (to nearest even, beyond
// the largest: infinity).
bool convertible(const FromL0C& copy) {
  if (copy.quantization == 0) return copy.to == copy.from || (bytes_of(copy.to) == 4 && bytes_of(copy.from) == 4);
  if (copy.from != Type::kF32) return false;
  return (copy.quantization == 1 && copy.to == Type::kF16) || (copy.quantization == 16 && copy.to == Type::kBF16);
}

void convert(uint8_t* to, const uint8_t* from, size_t count, const FromL0C& copy) {
  for (size_t i = 0; i < count; ++i) {
    if (copy.from == Type::kF32) {
      float value;
      std::memcpy(&value, from + 4 * i, 4);
      if (copy.relu != 0 && value < 0) value = 0;
      if (copy.to == Type::kF32) std::memcpy(to + 4 * i, &value, 4);
      const uint16_t narrow = copy.to == Type::kF16 ? half_bits(value) : bfloat16_bits(value);
      if (copy.to != Type::kF32) std::memcpy(to + 2 * i, &narrow, 2);
    } else {
      int32_t value;
      std::memcpy(&value, from + 4 * i, 4);
      if (copy.relu != 0 && value < 0) value = 0;
      std::memcpy(to + 4 * i, &value, 4);
    }
  }
}

}  // namespace

// L0C holds columns of 16 x 16 fractals, `source_stride` rows each; rows of the destination are `destination_stride`
// elements apart. Dual 1: the upper half of the rows goes to the first vector core's UB and the lower half to the
// second's, to the same addresses; dual 2: halves of the columns.
void copy_from_l0c(const FromL0C& copy, bool to_ub) {
  if (!convertible(copy)) {
    Finding finding;
    finding.rule = "call";
    finding.what = std::string(copy.call) + " with quantization " + std::to_string(copy.quantization) +
                   " is not among what the runtime converts: 0 (none), 1 (float to half), 16 (float to bfloat16)";
    report(std::move(finding));
    return;
  }
  const int atomic = here.core->atomic;
  const Type atomic_type = static_cast<Type>(here.core->atomic_type);
  record_work(kFIX, copy.call, [=] {
    const size_t size = bytes_of(copy.to);
    const int half_rows = copy.dual == 1 ? copy.rows / 2 : copy.rows,
              half_columns = copy.dual == 2 ? copy.columns / 2 : copy.columns;
    for (int column = 0; column < copy.columns; column += 16) {
      const int count = std::min(16, copy.columns - column);
      for (int row = 0; row < copy.rows; ++row) {
        const auto* source =
            static_cast<const char*>(copy.source) + (int64_t{column} / 16 * copy.source_stride + row) * 64;
        const Bytes from = on_chip(kL0C, source, count * 4, Access::kRead);
        uint8_t values[64], flags[64] = {};
        convert(values, from.data, count, copy);
        if (from.unwritten != nullptr)
          for (size_t i = 0; i < count * size; ++i) flags[i] = from.unwritten[i / size * 4];
        const Bytes converted{values, from.unwritten == nullptr ? nullptr : flags};
        if (!to_ub) {
          auto* to = static_cast<char*>(copy.destination) + (uint64_t(row) * copy.destination_stride + column) * size;
          store_global(to, converted, count * size, kL0C, source, atomic, atomic_type);
          continue;
        }
        // A row of a fractal may belong to both halves.
        for (int begin = 0; begin < count;) {
          const int at = column + begin,
                    end = copy.dual == 2 && at < half_columns ? std::min(count, half_columns - column) : count;
          const int second = copy.dual == 1 ? row / half_rows : copy.dual == 2 ? at / half_columns : copy.second;
          const uint64_t to_row = copy.dual == 1 ? row % half_rows : row,
                         to_column = copy.dual == 2 ? at % half_columns : at;
          const auto* to =
              static_cast<const char*>(copy.destination) + (to_row * copy.destination_stride + to_column) * size;
          const Bytes part{values + begin * size, converted.unwritten == nullptr ? nullptr : flags + begin * size};
          move(on_chip(second != 0 ? kUB1 : kUB0, to, (end - begin) * size, Access::kWrite), part,
               (end - begin) * size);
          begin = end;
        }
      }
    }
  });
}

}  // namespace glass

using namespace glass;

void asc_copy_ub2gm_align(uint8_t* to, uint8_t* from, int bursts, uint32_t length, asc_store_l2_cache_mode,
                          uint64_t destination_stride, uint64_t source_stride) {
  const int atomic = here.core->atomic;
  const Type type = static_cast<Type>(here.core->atomic_type);
  record_work(kMTE3, "asc_copy_ub2gm_align", [=] {
    for (int i = 0; i < bursts; ++i) {
      const uint8_t* source = from + i * source_stride;
      store_global(to + i * destination_stride, on_chip(own_ub(), source, length, Access::kRead), length, own_ub(),
                   source, atomic, type);
    }
  });
}

#define GLASS_ATOMIC_OF(op, kind, suffix, type) \
  void asc_set_atomic_##op##_##suffix() { \
    here.core->atomic = kind, here.core->atomic_type = static_cast<int>(Type::type); \
  }
#define GLASS_ATOMIC(suffix, type) \
  GLASS_ATOMIC_OF(add, kAdd, suffix, type) \
  GLASS_ATOMIC_OF(max, kMax, suffix, type) GLASS_ATOMIC_OF(min, kMin, suffix, type)
GLASS_ATOMIC(float, kF32)
GLASS_ATOMIC(float16, kF16)
GLASS_ATOMIC(bfloat, kBF16)
GLASS_ATOMIC(int8, kS8)
GLASS_ATOMIC(int16, kS16)
GLASS_ATOMIC(int32, kS32)
#undef GLASS_ATOMIC
#undef GLASS_ATOMIC_OF
void asc_set_atomic_none() { here.core->atomic = kNone; }
