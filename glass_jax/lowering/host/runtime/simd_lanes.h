// How the bodies of register calls go over lanes.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace glass {

// The bits of a mask that count for lanes of `Width` bytes.
template <int Width>
constexpr uint64_t lane_bits() {
  uint64_t bits = 0;
  for (int i = 0; i < 64; i += Width) bits |= uint64_t{1} << i;
  return bits;
}

// The same bits for all bytes of each lane.
template <int Width>
uint64_t spread(uint64_t bits) {
  if constexpr (Width == 8) return (bits & lane_bits<8>()) * 0xff;
  else return (bits & lane_bits<Width>()) * ((1u << Width) - 1);
}

template <int Width>
bool selects_all(const Mask& m) {
  uint64_t missing = 0;
  for (const uint64_t bits : m.bits) missing |= ~bits & lane_bits<Width>();
  return missing == 0;
}

// d = f(lane) where the mask is set, else zero. `depends`: bits of the bytes that nobody wrote, among all that f reads.
template <class D, class F>
void for_lanes(Vec<D>& d, const Mask& m, const uint64_t (&depends)[4], F f) {
  Vec<D> result;
  D* lanes = result.lanes();
  for (int i = 0; i < Vec<D>::kLanes; ++i) lanes[i] = f(i);
  if (!selects_all<sizeof(D)>(m)) {
    for (int i = 0; i < Vec<D>::kLanes; ++i)
      if (!m.at(i * sizeof(D))) std::memset(&lanes[i], 0, sizeof(D));
  }
  for (int w = 0; w < 4; ++w)
    result.unwritten[w] = (depends[w] & spread<sizeof(D)>(m.bits[w])) | spread<sizeof(D)>(m.unwritten[w]);
  d = result;
}

// The bits that a mask made of lanes' comparisons depends on.
template <int Width>
uint64_t any_of_lane(uint64_t bits) {
  uint64_t any = 0;
  for (int i = 0; i < Width; ++i) any |= bits >> i;
  return any & lane_bits<Width>();
}

#define GLASS_DEPENDS2(a, b) \
  {(a).unwritten[0] | (b).unwritten[0], (a).unwritten[1] | (b).unwritten[1], (a).unwritten[2] | (b).unwritten[2], \
   (a).unwritten[3] | (b).unwritten[3]}

// Whether any of the lanes that a mask selects depends on bytes nobody wrote, or the mask itself does.
template <int Width>
bool selected_unwritten(const Register& a, const Mask& m) {
  uint64_t any = 0;
  for (int w = 0; w < 4; ++w) any |= (a.unwritten[w] & spread<Width>(m.bits[w])) | m.unwritten[w];
  return any != 0;
}

inline void clear(Register& d) { std::memset(static_cast<void*>(&d), 0, sizeof d); }
inline bool bit(const uint64_t (&bits)[4], int at) { return bits[at >> 6] >> (at & 63) & 1; }
inline void set_bits(uint64_t (&bits)[4], int at, int count, bool on) {
  for (int i = at; i < at + count; ++i) {
    const uint64_t one = uint64_t{1} << (i & 63);
    bits[i >> 6] = on ? bits[i >> 6] | one : bits[i >> 6] & ~one;
  }
}

// Copies a lane of `size` bytes, with its bits.
inline void copy_lane(Register& d, int to, const Register& a, int from, int size) {
  std::memcpy(d.bytes + to, a.bytes + from, size);
  for (int i = 0; i < size; ++i)
    if (bit(a.unwritten, from + i)) set_bits(d.unwritten, to + i, 1, true);
}

}  // namespace glass
