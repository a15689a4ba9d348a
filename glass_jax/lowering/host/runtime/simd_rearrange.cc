// Lanes put elsewhere, and counted.
#include "simd_lanes.h"
#include "simd_types.h"

namespace glass {

void interleave(Register& d0, Register& d1, const Register& a, const Register& b, int size) {
  Register low, high;
  clear(low), clear(high);
  for (int i = 0; i < 256; i += size) {
    Register& to = i < 128 ? low : high;
    copy_lane(to, 2 * i % 256, a, i, size);
    copy_lane(to, 2 * i % 256 + size, b, i, size);
  }
  d0 = low, d1 = high;
}

void deinterleave(Register& d0, Register& d1, const Register& a, const Register& b, int size) {
  Register even, odd;
  clear(even), clear(odd);
  for (int i = 0; i < 256; i += size) {
    const Register& from = i < 128 ? a : b;
    copy_lane(even, i, from, 2 * i % 256, size);
    copy_lane(odd, i, from, 2 * i % 256 + size, size);
  }
  d0 = even, d1 = odd;
}

// d[i] = a[index[i]]; an index beyond the register wraps around.
void gather_lanes(Register& d, const Register& a, const Register& index, int size, int index_size) {
  Register result;
  clear(result);
  const int lanes = 256 / size;
  for (int i = 0; i < lanes && i < 256 / index_size; ++i) {
    uint32_t from = 0;
    std::memcpy(&from, index.bytes + i * index_size, index_size);
    copy_lane(result, i * size, a, static_cast<int>(from % lanes) * size, size);
    if (bit(index.unwritten, i * index_size)) set_bits(result.unwritten, i * size, size, true);
  }
  d = result;
}

// The lower halves of lanes of 2 * `size` bytes, into one half of the result; the other is zero.
void narrow_lanes(Register& d, const Register& a, int size, bool high) {
  Register result;
  clear(result);
  for (int i = 0; i < 128 / size; ++i) copy_lane(result, (high ? 128 : 0) + i * size, a, 2 * i * size, size);
  d = result;
}

void widen_lanes(Register& d, const Register& a, int size, bool is_signed, bool high) {
  Register result;
  clear(result);
  for (int i = 0; i < 128 / size; ++i) {
    const int from = (high ? 128 : 0) + i * size, to = 2 * i * size;
    copy_lane(result, to, a, from, size);
    if (is_signed && (a.bytes[from + size - 1] & 0x80) != 0) std::memset(result.bytes + to + size, 0xff, size);
    set_bits(result.unwritten, to + size, size, bit(a.unwritten, from + size - 1));
  }
  d = result;
}

// Selected lanes, one behind the other.
template <class T>
void asc_squeeze(Vec<T>& d, const Vec<T>& a, const Mask& m) {
  Vec<T> result;
  clear(result);
  int to = 0;
  bool unsure = false;
  for (int i = 0; i < Vec<T>::kLanes; ++i) {
    unsure |= bit(m.unwritten, i * sizeof(T));
    if (!m.at(i * sizeof(T))) continue;
    copy_lane(result, to * sizeof(T), a, i * sizeof(T), sizeof(T));
    if (unsure) set_bits(result.unwritten, to * sizeof(T), sizeof(T), true);
    ++to;
  }
  d = result;
}

template <class T>
void asc_unsqueeze(Vec<T>& d, const Mask& m) {
  T count = 0;
  bool unsure = false;
  clear(d);
  for (int i = 0; i < Vec<T>::kLanes; ++i) {
    d.lanes()[i] = count;
    if (unsure) set_bits(d.unwritten, i * sizeof(T), sizeof(T), true);
    count = static_cast<T>(count + m.at(i * sizeof(T)));
    unsure |= bit(m.unwritten, i * sizeof(T));
  }
}

namespace {
// `cumulative`: bytes up to n, counted from byte 0 in both halves. Seen in a kernel that selects by it; the vendor's
// text leaves open where the upper half begins to count.
void histogram(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m, int from, bool cumulative) {
  uint16_t count[256] = {};
  for (int i = 0; i < 256; ++i)
    if (m.at(i)) ++count[a.bytes[i]];
  if (cumulative)
    for (int i = 1; i < 256; ++i) count[i] = static_cast<uint16_t>(count[i] + count[i - 1]);
  for (int i = 0; i < 128; ++i) d.lanes()[i] = static_cast<uint16_t>(d.lanes()[i] + count[from + i]);
  if (selected_unwritten<1>(a, m)) set_bits(d.unwritten, 0, 256, true);
}
}  // namespace

void asc_frequency_histogram_bin0(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m) {
  histogram(d, a, m, 0, false);
}
void asc_frequency_histogram_bin1(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m) {
  histogram(d, a, m, 128, false);
}
void asc_cumulative_histogram_bin0(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m) {
  histogram(d, a, m, 0, true);
}
void asc_cumulative_histogram_bin1(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m) {
  histogram(d, a, m, 128, true);
}

#define X(T) template void asc_squeeze(Vec<T>&, const Vec<T>&, const Mask&);
GLASS_ALL_FLOATS(X)
GLASS_SIGNED(X)
GLASS_UNSIGNED(X)
GLASS_BYTES(X)
#undef X
#define X(T) template void asc_unsqueeze(Vec<T>&, const Mask&);
GLASS_SIGNED(X)
GLASS_UNSIGNED(X)
#undef X

}  // namespace glass
