// Masks: made, combined, packed, compared into; and what selects, fills and counts by them.
#include <string>

#include "findings.h"
#include "simd_lanes.h"
#include "simd_types.h"

namespace glass {

Mask first_lanes(int width, uint32_t count) {
  Mask mask{};
  const uint32_t lanes = 256 / width;
  for (uint32_t i = 0; i < std::min(count, lanes); ++i) mask.set(i * width, true);
  return mask;
}

Mask pattern_mask(int width, int pattern) {
  const uint32_t lanes = 256 / width;
  if (pattern > 0) return first_lanes(width, pattern);
  switch (pattern) {
    case decltype(PAT_ALLF)::value: return {};
    case decltype(PAT_H)::value: return first_lanes(width, lanes / 2);
    case decltype(PAT_Q)::value: return first_lanes(width, lanes / 4);
    case decltype(PAT_M3)::value:
    case decltype(PAT_M4)::value: {
      Mask mask{};
      for (uint32_t i = 0; i < lanes; i += pattern == decltype(PAT_M3)::value ? 3 : 4) mask.set(i * width, true);
      return mask;
    }
    default: return first_lanes(width, lanes);
  }
}

namespace {

template <class F>
void combine(Mask& d, const Mask& a, const Mask& b, const Mask& m, F f) {
  Mask result;
  for (int w = 0; w < 4; ++w) {
    result.bits[w] = f(a.bits[w], b.bits[w]) & m.bits[w];
    result.unwritten[w] = ((a.unwritten[w] | b.unwritten[w]) & m.bits[w]) | m.unwritten[w];
  }
  d = result;
}

// Groups of `width` bits of two masks, one after the other, put elsewhere: `from` tells whence each group of the result
// comes.
template <class F>
void permute(Mask& d0, Mask& d1, const Mask& a, const Mask& b, int width, F from) {
  Mask low{}, high{};
  const int groups = 256 / width;
  for (int i = 0; i < 2 * groups; ++i) {
    const int source = from(i, groups);
    const Mask& s = source < groups ? a : b;
    Mask& d = i < groups ? low : high;
    for (int j = 0; j < width; ++j) {
      const int to = i % groups * width + j, at = source % groups * width + j;
      d.set(to, s.at(at));
      set_bits(d.unwritten, to, 1, bit(s.unwritten, at));
    }
  }
  d0 = low, d1 = high;
}

// Every second bit, or each bit at every second place.
void repack(Mask& d, const Mask& a, bool pack, int offset) {
  Mask result{};
  for (int i = 0; i < 128; ++i) {
    const int from = pack ? 2 * i : offset + i, to = pack ? offset + i : 2 * i;
    result.set(to, a.at(from));
    set_bits(result.unwritten, to, 1, bit(a.unwritten, from));
  }
  d = result;
}

template <class T, class F>
void compare(Mask& d, const Mask& m, const uint64_t (&depends)[4], F f) {
  Mask result{};
  for (int i = 0; i < Vec<T>::kLanes; ++i)
    if (m.at(i * sizeof(T)) && f(i)) result.set(i * sizeof(T), true);
  for (int w = 0; w < 4; ++w) result.unwritten[w] = (any_of_lane<sizeof(T)>(depends[w]) & m.bits[w]) | m.unwritten[w];
  d = result;
}

}  // namespace

void asc_and(Mask& d, const Mask& a, const Mask& b, const Mask& m) {
  combine(d, a, b, m, [](uint64_t x, uint64_t y) { return x & y; });
}
void asc_or(Mask& d, const Mask& a, const Mask& b, const Mask& m) {
  combine(d, a, b, m, [](uint64_t x, uint64_t y) { return x | y; });
}
void asc_xor(Mask& d, const Mask& a, const Mask& b, const Mask& m) {
  combine(d, a, b, m, [](uint64_t x, uint64_t y) { return x ^ y; });
}
void asc_not(Mask& d, const Mask& a, const Mask& m) {
  combine(d, a, a, m, [](uint64_t x, uint64_t) { return ~x; });
}
void asc_select(Mask& d, const Mask& a, const Mask& b, const Mask& m) {
  Mask result;
  for (int w = 0; w < 4; ++w) {
    result.bits[w] = (a.bits[w] & m.bits[w]) | (b.bits[w] & ~m.bits[w]);
    result.unwritten[w] = (a.unwritten[w] & m.bits[w]) | (b.unwritten[w] & ~m.bits[w]) | m.unwritten[w];
  }
  d = result;
}

#define GLASS_INTERLEAVE(suffix, width) \
  void asc_intlv_##suffix(Mask& d0, Mask& d1, const Mask& a, const Mask& b) { \
    permute(d0, d1, a, b, width, [](int i, int groups) { return i / 2 + i % 2 * groups; }); \
  } \
  void asc_deintlv_##suffix(Mask& d0, Mask& d1, const Mask& a, const Mask& b) { \
    permute(d0, d1, a, b, width, [](int i, int groups) { return i % groups * 2 + i / groups; }); \
  }
GLASS_INTERLEAVE(b8, 1)
GLASS_INTERLEAVE(b16, 2)
GLASS_INTERLEAVE(b32, 4)
#undef GLASS_INTERLEAVE
void asc_pack_to_low(Mask& d, const Mask& a) { repack(d, a, true, 0); }
void asc_pack_to_high(Mask& d, const Mask& a) { repack(d, a, true, 128); }
void asc_unpack_lower(Mask& d, const Mask& a) { repack(d, a, false, 0); }
void asc_unpack_upper(Mask& d, const Mask& a) { repack(d, a, false, 128); }

#define GLASS_COMPARE(name, op) \
  template <class T> \
  void name(Mask& d, const Vec<T>& a, const Vec<T>& b, const Mask& m) { \
    const uint64_t depends[4] = GLASS_DEPENDS2(a, b); \
    compare<T>(d, m, depends, [&](int i) { return a.lanes()[i] op b.lanes()[i]; }); \
  } \
  template <class T> \
  void name##_scalar(Mask& d, const Vec<T>& a, std::type_identity_t<T> x, const Mask& m) { \
    compare<T>(d, m, a.unwritten, [&](int i) { return a.lanes()[i] op x; }); \
  }
GLASS_COMPARE(asc_eq, ==)
GLASS_COMPARE(asc_ne, !=)
GLASS_COMPARE(asc_gt, >)
GLASS_COMPARE(asc_ge, >=)
GLASS_COMPARE(asc_lt, <)
GLASS_COMPARE(asc_le, <=)
#undef GLASS_COMPARE

template <class T>
void asc_select(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m) {
  Vec<T> result;
  if (selects_all<sizeof(T)>(m)) std::memcpy(result.bytes, a.bytes, sizeof a.bytes);
  else
    for (int i = 0; i < Vec<T>::kLanes; ++i) result.lanes()[i] = m.at(i * sizeof(T)) ? a.lanes()[i] : b.lanes()[i];
  for (int w = 0; w < 4; ++w) {
    const uint64_t chosen = spread<sizeof(T)>(m.bits[w]);
    result.unwritten[w] = (a.unwritten[w] & chosen) | (b.unwritten[w] & ~chosen) | spread<sizeof(T)>(m.unwritten[w]);
  }
  d = result;
}

template <class T>
void asc_duplicate_scalar(Vec<T>& d, std::type_identity_t<T> x, const Mask& m) {
  const uint64_t depends[4] = {};
  for_lanes(d, m, depends, [x](int) { return x; });
}

namespace {
template <class T>
void duplicate_lane(Vec<T>& d, const Vec<T>& a, const Mask& m, int lane) {
  const T value = a.lanes()[lane];
  const bool unwritten = bit(a.unwritten, lane * int(sizeof(T)));
  const uint64_t all = unwritten ? ~uint64_t{0} : 0, depends[4] = {all, all, all, all};
  for_lanes(d, m, depends, [value](int) { return value; });
}
}  // namespace

template <class T>
void asc_duplicate(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  duplicate_lane(d, a, m, 0);
}
template <class T>
void asc_duplicate_highest(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  duplicate_lane(d, a, m, Vec<T>::kLanes - 1);
}

// Integers wrap around.
template <class T>
void asc_arange(Vec<T>& d, std::type_identity_t<T> from) {
  clear(d);
  for (int i = 0; i < Vec<T>::kLanes; ++i) {
    if constexpr (kIsFloat<T>) d.lanes()[i] = T(float(from) + float(i));
    else d.lanes()[i] = static_cast<T>(static_cast<uint64_t>(from) + i);
  }
}
template <class T>
void asc_arange_descend(Vec<T>& d, std::type_identity_t<T> from) {
  asc_arange(d, from);
  std::reverse(d.lanes(), d.lanes() + Vec<T>::kLanes);
}

#define X(T) \
  template void asc_select(Vec<T>&, const Vec<T>&, const Vec<T>&, const Mask&); \
  template void asc_duplicate_scalar(Vec<T>&, std::type_identity_t<T>, const Mask&); \
  template void asc_duplicate(Vec<T>&, const Vec<T>&, const Mask&); \
  template void asc_duplicate_highest(Vec<T>&, const Vec<T>&, const Mask&);
GLASS_ALL(X)
#undef X
#define GLASS_MAKE_COMPARE(name, T) \
  template void name(Mask&, const Vec<T>&, const Vec<T>&, const Mask&); \
  template void name##_scalar(Mask&, const Vec<T>&, std::type_identity_t<T>, const Mask&);
#define X(T) \
  GLASS_MAKE_COMPARE(asc_eq, T) \
  GLASS_MAKE_COMPARE(asc_ne, T) GLASS_MAKE_COMPARE(asc_gt, T) GLASS_MAKE_COMPARE(asc_ge, T) \
      GLASS_MAKE_COMPARE(asc_lt, T) GLASS_MAKE_COMPARE(asc_le, T)
GLASS_NUMBERS(X)
#undef X
#define X(T) \
  template void asc_arange(Vec<T>&, std::type_identity_t<T>); \
  template void asc_arange_descend(Vec<T>&, std::type_identity_t<T>);
GLASS_FLOATS(X)
GLASS_SIGNED(X)
GLASS_UNSIGNED(X)
#undef X

}  // namespace glass
