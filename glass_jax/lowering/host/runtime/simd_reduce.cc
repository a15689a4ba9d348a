// Across lanes: sums, which go in pairs of neighbours (a binary tree, as the vendor documents), and extremes.
#include "simd_lanes.h"
#include "simd_types.h"

namespace glass {
namespace {

// What lanes that the mask leaves out count as.
template <class T>
constexpr T least() {
  if constexpr (kIsFloat<T>) return T(-std::numeric_limits<float>::infinity());
  else return std::numeric_limits<T>::lowest();
}
template <class T>
constexpr T greatest() {
  if constexpr (kIsFloat<T>) return T(std::numeric_limits<float>::infinity());
  else return std::numeric_limits<T>::max();
}

template <class T>
T add(T a, T b) {
  if constexpr (kIsFloat<T>) return a + b;
  else return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

template <class D, class T>
D tree_sum(const Vec<T>& a, const Mask& m, int begin, int count) {
  D lanes[Vec<T>::kLanes];
  for (int i = 0; i < count; ++i) lanes[i] = m.at((begin + i) * sizeof(T)) ? D(a.lanes()[begin + i]) : D(0);
  for (; count > 1; count /= 2)
    for (int i = 0; i < count / 2; ++i) lanes[i] = add(lanes[2 * i], lanes[2 * i + 1]);
  return lanes[0];
}

// The first NaN if there is one; else the extreme, +0 above -0, and where it is first.
template <bool Max, class T>
std::pair<T, int> extreme(const Vec<T>& a, const Mask& m, int begin, int count) {
  T best = Max ? least<T>() : greatest<T>();
  int at = 0;
  bool found = false;
  for (int i = 0; i < count; ++i) {
    if (!m.at((begin + i) * sizeof(T))) continue;
    const T x = a.lanes()[begin + i];
    if (x != x) return {x, i};
    bool better = Max ? x > best : x < best;
    if constexpr (kIsFloat<T>)
      better |= x == best && std::signbit(float(x)) != std::signbit(float(best)) && std::signbit(float(best)) == Max;
    if (better || !found) best = x, at = i, found = true;
  }
  return {best, at};
}

template <bool Max, class T>
void reduce_extreme(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  const bool unwritten = selected_unwritten<sizeof(T)>(a, m);
  const auto [value, at] = extreme<Max>(a, m, 0, Vec<T>::kLanes);
  clear(d);
  d.lanes()[0] = value;
  std::memcpy(&d.lanes()[1], &at, sizeof(T));  // as an integer of the same size
  set_bits(d.unwritten, 0, 2 * sizeof(T), unwritten);
}

// One result for each block of 32 bytes.
template <class D, class T, class F>
void reduce_blocks(Vec<D>& d, const Vec<T>& a, const Mask& m, F f) {
  constexpr int kLanes = 32 / sizeof(T);
  Vec<D> result;
  clear(result);
  for (int block = 0; block < 8; ++block) {
    result.lanes()[block] = f(block * kLanes, kLanes);
    for (int i = block * 32; i < block * 32 + 32; ++i)
      if (bit(m.unwritten, i) || (bit(a.unwritten, i) && m.at(i / int(sizeof(T)) * int(sizeof(T)))))
        set_bits(result.unwritten, block * sizeof(D), sizeof(D), true);
  }
  d = result;
}

}  // namespace

template <class D, class T>
void asc_reduce_sum(Vec<D>& d, const Vec<T>& a, const Mask& m) {
  const bool unwritten = selected_unwritten<sizeof(T)>(a, m);
  const D sum = tree_sum<D>(a, m, 0, Vec<T>::kLanes);
  clear(d);
  d.lanes()[0] = sum;
  set_bits(d.unwritten, 0, sizeof(D), unwritten);
}
template <class D, class T>
void asc_reduce_sum_datablock(Vec<D>& d, const Vec<T>& a, const Mask& m) {
  reduce_blocks(d, a, m, [&](int begin, int count) { return tree_sum<D>(a, m, begin, count); });
}
template <class T>
void asc_reduce_max(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  reduce_extreme<true>(d, a, m);
}
template <class T>
void asc_reduce_min(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  reduce_extreme<false>(d, a, m);
}
template <class T>
void asc_reduce_max_datablock(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  reduce_blocks(d, a, m, [&](int begin, int count) { return extreme<true>(a, m, begin, count).first; });
}
template <class T>
void asc_reduce_min_datablock(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  reduce_blocks(d, a, m, [&](int begin, int count) { return extreme<false>(a, m, begin, count).first; });
}

// Neighbours are added; the sums fill the lower half.
template <class T>
void asc_pair_reduce_sum(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  Vec<T> result;
  clear(result);
  const auto lane = [&](int i) { return m.at(i * sizeof(T)) ? a.lanes()[i] : T(0); };
  for (int i = 0; i < Vec<T>::kLanes / 2; ++i) {
    result.lanes()[i] = add(lane(2 * i), lane(2 * i + 1));
    for (int j = 2 * i; j < 2 * i + 2; ++j)
      if (m.at(j * sizeof(T)) && bit(a.unwritten, j * sizeof(T)))
        set_bits(result.unwritten, i * sizeof(T), sizeof(T), true);
  }
  d = result;
}

#define X(T) \
  template void asc_reduce_max(Vec<T>&, const Vec<T>&, const Mask&); \
  template void asc_reduce_min(Vec<T>&, const Vec<T>&, const Mask&); \
  template void asc_reduce_max_datablock(Vec<T>&, const Vec<T>&, const Mask&); \
  template void asc_reduce_min_datablock(Vec<T>&, const Vec<T>&, const Mask&);
GLASS_FLOATS(X)
X(int16_t)
X(uint16_t) X(int32_t) X(uint32_t)
#undef X
#define X(D, T) \
  template void asc_reduce_sum(Vec<D>&, const Vec<T>&, const Mask&); \
  template void asc_reduce_sum_datablock(Vec<D>&, const Vec<T>&, const Mask&);
    X(float, float) X(half, half) X(int32_t, int32_t) X(uint32_t, uint32_t) X(int32_t, int16_t) X(uint32_t, uint16_t)
#undef X
        template void asc_pair_reduce_sum(Vec<float>&, const Vec<float>&, const Mask&);
template void asc_pair_reduce_sum(Vec<half>&, const Vec<half>&, const Mask&);

}  // namespace glass
