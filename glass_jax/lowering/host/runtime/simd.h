// Registers, masks and the calls that work on them. Bodies are in simd_*.cc, compiled once for every element type that
// a call takes; a type that it does not take is an undefined symbol when the kernel is linked.
#pragma once

#include "device.h"

namespace glass {

// 256 bytes, and a bit for each that says that it depends on bytes which nobody wrote.
struct alignas(64) Register {
  uint8_t bytes[256];
  uint64_t unwritten[4];
};

template <class T>
struct Vec : Register {
  static constexpr int kLanes = 256 / sizeof(T);
  T* lanes() { return reinterpret_cast<T*>(bytes); }
  const T* lanes() const { return reinterpret_cast<const T*>(bytes); }
};

// A bit for each byte of a register; that of a lane's first byte is the lane's.
struct Mask {
  uint64_t bits[4];
  uint64_t unwritten[4];
  bool at(int byte) const { return bits[byte >> 6] >> (byte & 63) & 1; }
  void set(int byte, bool on) {
    const uint64_t one = uint64_t{1} << (byte & 63);
    bits[byte >> 6] = on ? bits[byte >> 6] | one : bits[byte >> 6] & ~one;
  }
};

Mask pattern_mask(int width, int pattern);
Mask first_lanes(int width, uint32_t count);

}  // namespace glass

using vector_bool = glass::Mask;
using vector_f32 = glass::Vec<float>;
using vector_f16 = glass::Vec<half>;
using vector_bf16 = glass::Vec<bfloat16_t>;
using vector_f8e4m3 = glass::Vec<float8_e4m3_t>;
using vector_f8e5m2 = glass::Vec<float8_e5m2_t>;
using vector_f8e8m0 = glass::Vec<float8_e8m0_t>;
using vector_f4e2m1x2 = glass::Vec<float4_e2m1x2_t>;
using vector_f4e1m2x2 = glass::Vec<float4_e1m2x2_t>;
using vector_s8 = glass::Vec<int8_t>;
using vector_u8 = glass::Vec<uint8_t>;
using vector_s16 = glass::Vec<int16_t>;
using vector_u16 = glass::Vec<uint16_t>;
using vector_s32 = glass::Vec<int32_t>;
using vector_u32 = glass::Vec<uint32_t>;
using vector_s64 = glass::Vec<int64_t>;
using vector_u64 = glass::Vec<uint64_t>;
using vector_uint16_t = vector_u16;
using vector_uint32_t = vector_u32;

namespace glass {  // where argument-dependent lookup finds what follows, for registers and masks

// --- masks
// ------------------------------------------------------------------------------------------------------------
#define GLASS_MASKS(suffix, width) \
  template <int Pattern> \
  Mask asc_create_mask_##suffix(Constant<struct ::glass_pattern, Pattern>) { \
    return pattern_mask(width, Pattern); \
  } \
  inline Mask asc_update_mask_##suffix(uint32_t& count) { \
    const uint32_t lanes = 256 / width; \
    const Mask mask = first_lanes(width, count); \
    count -= count < lanes ? count : lanes; \
    return mask; \
  } \
  void asc_intlv_##suffix(Mask& d0, Mask& d1, const Mask& a, const Mask& b); \
  void asc_deintlv_##suffix(Mask& d0, Mask& d1, const Mask& a, const Mask& b);
GLASS_MASKS(b8, 1)
GLASS_MASKS(b16, 2)
GLASS_MASKS(b32, 4)
#undef GLASS_MASKS
void asc_and(Mask& d, const Mask& a, const Mask& b, const Mask& m);
void asc_or(Mask& d, const Mask& a, const Mask& b, const Mask& m);
void asc_xor(Mask& d, const Mask& a, const Mask& b, const Mask& m);
void asc_not(Mask& d, const Mask& a, const Mask& m);
void asc_select(Mask& d, const Mask& a, const Mask& b, const Mask& m);
void asc_pack_to_low(Mask& d, const Mask& a);
void asc_pack_to_high(Mask& d, const Mask& a);
void asc_unpack_lower(Mask& d, const Mask& a);
void asc_unpack_upper(Mask& d, const Mask& a);

// --- arithmetic, logic, comparison: lanes that the mask leaves out become zero
// ---------------------------------------------
#define GLASS_BINARY(name) \
  template <class T> \
  void name(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m);
GLASS_BINARY(asc_add)
GLASS_BINARY(asc_sub)
GLASS_BINARY(asc_mul)
GLASS_BINARY(asc_div)
GLASS_BINARY(asc_max)
GLASS_BINARY(asc_min)
GLASS_BINARY(asc_and)
GLASS_BINARY(asc_or)
GLASS_BINARY(asc_xor)
GLASS_BINARY(asc_abs_sub)
GLASS_BINARY(asc_prelu)
GLASS_BINARY(asc_madd)
#undef GLASS_BINARY
template <class T, class I>
void asc_shiftleft(Vec<T>& d, const Vec<T>& a, const Vec<I>& by, const Mask& m);
template <class T, class I>
void asc_shiftright(Vec<T>& d, const Vec<T>& a, const Vec<I>& by, const Mask& m);
void asc_exp_sub(Vec<float>& d, const Vec<float>& a, const Vec<float>& b, const Mask& m);
void asc_exp_sub(Vec<float>& d, const Vec<half>& a, const Vec<half>& b, const Mask& m);

// The scalar is converted to the type of the lanes.
#define GLASS_SCALAR(name) \
  template <class T> \
  void name(Vec<T>& d, const Vec<T>& a, std::type_identity_t<T> x, const Mask& m);
GLASS_SCALAR(asc_add_scalar)
GLASS_SCALAR(asc_mul_scalar)
GLASS_SCALAR(asc_max_scalar)
GLASS_SCALAR(asc_min_scalar)
GLASS_SCALAR(asc_leakyrelu)
GLASS_SCALAR(asc_axpy)
#undef GLASS_SCALAR
template <class T>
void asc_shiftleft_scalar(Vec<T>& d, const Vec<T>& a, int16_t by, const Mask& m);
template <class T>
void asc_shiftright_scalar(Vec<T>& d, const Vec<T>& a, int16_t by, const Mask& m);

#define GLASS_UNARY(name) \
  template <class T> \
  void name(Vec<T>& d, const Vec<T>& a, const Mask& m);
GLASS_UNARY(asc_exp)
GLASS_UNARY(asc_ln)
GLASS_UNARY(asc_sqrt)
GLASS_UNARY(asc_abs)
GLASS_UNARY(asc_neg)
GLASS_UNARY(asc_relu)
GLASS_UNARY(asc_not)
GLASS_UNARY(asc_duplicate)
GLASS_UNARY(asc_duplicate_highest)
GLASS_UNARY(asc_squeeze)
GLASS_UNARY(asc_pair_reduce_sum)
GLASS_UNARY(asc_reduce_max)
GLASS_UNARY(asc_reduce_min)
GLASS_UNARY(asc_reduce_max_datablock)
GLASS_UNARY(asc_reduce_min_datablock)
#undef GLASS_UNARY
// Sums; the lanes of 16-bit integers are added as 32-bit ones.
template <class D, class T>
void asc_reduce_sum(Vec<D>& d, const Vec<T>& a, const Mask& m);
template <class D, class T>
void asc_reduce_sum_datablock(Vec<D>& d, const Vec<T>& a, const Mask& m);

#define GLASS_COMPARE(name) \
  template <class T> \
  void name(Mask& d, const Vec<T>& a, const Vec<T>& b, const Mask& m); \
  template <class T> \
  void name##_scalar(Mask& d, const Vec<T>& a, std::type_identity_t<T> x, const Mask& m);
GLASS_COMPARE(asc_eq)
GLASS_COMPARE(asc_ne)
GLASS_COMPARE(asc_gt)
GLASS_COMPARE(asc_ge)
GLASS_COMPARE(asc_lt)
GLASS_COMPARE(asc_le)
#undef GLASS_COMPARE

// Sums and differences with the carry of each lane (of a difference: 1 if nothing was borrowed).
void asc_add(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& m);
void asc_sub(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& m);
void asc_addc(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& carried,
              const Mask& m);
void asc_subc(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& carried,
              const Mask& m);
template <class T>
void asc_mull(Vec<T>& low, Vec<T>& high, const Vec<T>& a, const Vec<T>& b, const Mask& m);

// a where the mask is set, else b.
template <class T>
void asc_select(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m);
template <class T>
void asc_duplicate_scalar(Vec<T>& d, std::type_identity_t<T> x, const Mask& m);
template <class T>
void asc_arange(Vec<T>& d, std::type_identity_t<T> from);
template <class T>
void asc_arange_descend(Vec<T>& d, std::type_identity_t<T> from);

// --- rearrangement
// ------------------------------------------------------------------------------------------------------ By the size of
// a lane alone.
void interleave(Register& d0, Register& d1, const Register& a, const Register& b, int size);
void deinterleave(Register& d0, Register& d1, const Register& a, const Register& b, int size);
void gather_lanes(Register& d, const Register& a, const Register& index, int size, int index_size);
void narrow_lanes(Register& d, const Register& a, int size, bool high);
void widen_lanes(Register& d, const Register& a, int size, bool is_signed, bool high);
template <class T>
void asc_intlv(Vec<T>& d0, Vec<T>& d1, const Vec<T>& a, const Vec<T>& b) {
  interleave(d0, d1, a, b, sizeof(T));
}
template <class T>
void asc_deintlv(Vec<T>& d0, Vec<T>& d1, const Vec<T>& a, const Vec<T>& b) {
  deinterleave(d0, d1, a, b, sizeof(T));
}
template <class T, class I>
void asc_gather(Vec<T>& d, const Vec<T>& a, const Vec<I>& index) {
  gather_lanes(d, a, index, sizeof(T), sizeof(I));
}
template <class D, class T>
void asc_pack_to_low(Vec<D>& d, const Vec<T>& a) {
  static_assert(sizeof(T) == 2 * sizeof(D));
  narrow_lanes(d, a, sizeof(D), false);
}
template <class D, class T>
void asc_pack_to_high(Vec<D>& d, const Vec<T>& a) {
  static_assert(sizeof(T) == 2 * sizeof(D));
  narrow_lanes(d, a, sizeof(D), true);
}
template <class D, class T>
void asc_unpack_lower(Vec<D>& d, const Vec<T>& a) {
  static_assert(sizeof(D) == 2 * sizeof(T));
  widen_lanes(d, a, sizeof(T), std::is_signed_v<T>, false);
}
template <class D, class T>
void asc_unpack_upper(Vec<D>& d, const Vec<T>& a) {
  static_assert(sizeof(D) == 2 * sizeof(T));
  widen_lanes(d, a, sizeof(T), std::is_signed_v<T>, true);
}
// Of each lane, how many lanes before it the mask selects.
template <class T>
void asc_unsqueeze(Vec<T>& d, const Mask& m);
// How often each byte occurs among the lanes of the mask, or it and all smaller ones, added to d: bytes 0 to 127, 128
// to 255.
void asc_frequency_histogram_bin0(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m);
void asc_frequency_histogram_bin1(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m);
void asc_cumulative_histogram_bin0(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m);
void asc_cumulative_histogram_bin1(Vec<uint16_t>& d, const Vec<uint8_t>& a, const Mask& m);

// --- conversion
// ---------------------------------------------------------------------------------------------------------
struct Conversion {
  Type to, from;
  Rounding rounding = Rounding::kNearestEven;
  bool saturate = false;
  int part = 0;        // which of the narrow lanes that lie under a wide one
  bool merge = false;  // lanes that are not written stay as they are, instead of zero
};
void convert(Register& d, const Register& a, const Mask& m, const Conversion& conversion);
constexpr bool is_number(Type type) { return type != Type::kE8M0 && type != Type::kU64; }

template <int V>
void control(Conversion& c, Constant<struct ::glass_round, V>) {
  c.rounding = static_cast<Rounding>(V);
}
template <int V>
void control(Conversion& c, Constant<struct ::glass_saturation, V>) {
  c.saturate = V != 0;
}
template <int V>
void control(Conversion& c, Constant<struct ::glass_part, V>) {
  c.part = V;
}
template <int V>
void control(Conversion& c, Constant<struct ::glass_mode, V>) {
  c.merge = V != 0;
}
template <class D, class T, class... Controls>
void vcvt(Vec<D>& d, const Vec<T>& a, const Mask& m, Controls... controls) {
  static_assert(is_number(type_of<D>()) && is_number(type_of<T>()), "the runtime does not convert these types");
  Conversion conversion{type_of<D>(), type_of<T>()};
  (control(conversion, controls), ...);
  convert(d, a, m, conversion);
}

// d + a * b and a * d + b, rounded once; other lanes stay as they are.
template <class T>
void fused(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m, bool add_to_product);
template <class T, class Mode>
void vmula(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m, Mode) {
  fused(d, a, b, m, false);
}
template <class T, class Mode>
void vmadd(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m, Mode) {
  fused(d, a, b, m, true);
}

// --- loads and stores
// -----------------------------------------------------------------------------------------------------
enum class Load : uint8_t {
  kNormal,
  kBroadcast,
  kUpsample,
  kDownsample,
  kUnpack,
  kUnpack4,
  kBroadcastBlock,
  kElementToBlock
};
void load(Register& d, const void* from, int size, Load distribution);
void load_deinterleaved(Register& d0, Register& d1, const void* from, int size);
void load_blocks(Register& d, const void* from, const Register& index, const Mask* m);
void load_indexed(Register& d, const void* from, const Register& index, const Mask& m, int size, int index_size,
                  int lane_size);
enum class Store : uint8_t { kNormal, kFirst, kPack, kPackQuarter };
void store(void* to, const Register& a, const Mask& m, int size, Store distribution);
void store_blocks(void* to, const Register& a, const Mask& m, int size, uint16_t block_stride);
void store_indexed(void* to, const Register& a, const Register& index, const Mask& m, int size, int index_size);

#define GLASS_LOAD(suffix, distribution) \
  template <class T, class Offset> \
  void asc_loadalign##suffix(Vec<T>& d, T* from, Offset offset) { \
    load(d, from + offset, sizeof(T), Load::distribution); \
  } \
  template <class T> \
  void asc_loadalign##suffix##_postupdate(Vec<T>& d, T*& from, int32_t step) { \
    load(d, from, sizeof(T), Load::distribution); \
    from += step; \
  }
GLASS_LOAD(, kNormal)
GLASS_LOAD(_brc_elem, kBroadcast)
GLASS_LOAD(_upsample, kUpsample)
GLASS_LOAD(_downsample, kDownsample)
GLASS_LOAD(_unpack, kUnpack)
GLASS_LOAD(_unpack4, kUnpack4)
GLASS_LOAD(_brc_datablock, kBroadcastBlock)
GLASS_LOAD(_brc_elem2datablock, kElementToBlock)
#undef GLASS_LOAD
template <class T>
void asc_loadalign_deintlv(Vec<T>& d0, Vec<T>& d1, T* from, int32_t offset = 0) {
  load_deinterleaved(d0, d1, from + offset, sizeof(T));
}
// Offsets that would go through an address register, in elements.
inline int32_t asc_update_addr_reg_b8(int32_t offset) { return offset; }
inline int32_t asc_update_addr_reg_b16(int32_t offset) { return offset; }
inline int32_t asc_update_addr_reg_b32(int32_t offset) { return offset; }
template <class T>
void asc_gather_datablock(Vec<T>& d, T* from, const Vec<uint32_t>& index) {
  load_blocks(d, from, index, nullptr);
}
template <class T>
void asc_gather_datablock(Vec<T>& d, T* from, const Vec<uint32_t>& index, const Mask& m) {
  load_blocks(d, from, index, &m);
}
// Bytes come out as 16-bit lanes.
template <class D, class T, class I>
void asc_gather(Vec<D>& d, T* from, const Vec<I>& index, const Mask& m) {
  load_indexed(d, from, index, m, sizeof(T), sizeof(I), sizeof(D));
}

template <class T>
void asc_storealign(T* to, const Vec<T>& a, int32_t offset, const Mask& m) {
  store(to + offset, a, m, sizeof(T), Store::kNormal);
}
template <class T>
void asc_storealign_1st(T* to, const Vec<T>& a, int32_t offset) {
  store(to + offset, a, {}, sizeof(T), Store::kFirst);
}
// The lower half, or quarter, of each lane of the mask, one behind the other; offsets count what is stored.
template <class T>
void asc_storealign_pack(T* to, const Vec<T>& a, int32_t offset, const Mask& m) {
  store(reinterpret_cast<char*>(to) + offset * int(sizeof(T) / 2), a, m, sizeof(T), Store::kPack);
}
template <class T>
void asc_storealign_pack_quarter(T* to, const Vec<T>& a, int32_t offset, const Mask& m) {
  static_assert(sizeof(T) == 4);
  store(reinterpret_cast<char*>(to) + offset, a, m, sizeof(T), Store::kPackQuarter);
}
// Eight blocks of 32 bytes, `block_stride` blocks apart; after it the pointer moves on by `repeat_stride` blocks.
template <class T>
void asc_storealign(T* to, const Vec<T>& a, uint16_t block_stride, uint16_t, const Mask& m) {
  store_blocks(to, a, m, sizeof(T), block_stride);
}
template <class T>
void asc_storealign_postupdate(T*& to, const Vec<T>& a, uint16_t block_stride, uint16_t repeat_stride, const Mask& m) {
  store_blocks(to, a, m, sizeof(T), block_stride);
  to += repeat_stride * (32 / sizeof(T));
}
template <class T, class I>
void asc_scatter(T* to, const Vec<T>& a, const Vec<I>& index, const Mask& m) {
  store_indexed(to, a, index, m, sizeof(T), sizeof(I));
}
void asc_loadalign(Mask& d, const uint32_t* from, int32_t offset);
void asc_loadalign_upsample(Mask& d, const uint32_t* from, int32_t offset);
void asc_loadalign_downsample(Mask& d, const uint32_t* from, int32_t offset);
void asc_storealign(uint32_t* to, const Mask& a, int32_t offset);
void asc_storealign_pack(uint32_t* to, const Mask& a, int32_t offset);

}  // namespace glass

using glass::asc_create_mask_b16;
using glass::asc_create_mask_b32;
using glass::asc_create_mask_b8;
using glass::asc_update_addr_reg_b16;
using glass::asc_update_addr_reg_b32;
using glass::asc_update_addr_reg_b8;
using glass::asc_update_mask_b16;
using glass::asc_update_mask_b32;
using glass::asc_update_mask_b8;
// Later loads and stores of a region come after earlier ones.
void glass_memory_barrier(int kind);
template <int Kind>
void asc_mem_bar(glass::Constant<struct glass_barrier, Kind>) {
  glass_memory_barrier(Kind);
}
