// What the device's compiler gives a kernel by itself: qualifiers, names of pipes and modes, small vectors,
// mathematics.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "types.h"

// --- qualifiers: memories are told apart by their addresses and by the call, not by the type of a pointer
// ---------------
#define __NPU_ARCH__ 3510
#define __aicore__
#define __global__
#define __cube__
#define __vector__
#define __mix__(cubes, vectors)
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __simd_vf__
#define __simd_callee__
#define __simt_vf__
#define __simt_callee__
#define __launch_bounds__(threads)
#define __SIMT_DEVICE_FUNCTIONS_DECL__
#define ASC_IS_AIC (::glass::is_cube_core())
#define ASC_IS_AIV (!::glass::is_cube_core())

namespace AscendC {}

namespace cce {
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
}  // namespace cce

// --- names
// ------------------------------------------------------------------------------------------------------------
enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
enum event_t : int {};
enum class asc_load_l2_cache_mode : uint8_t {};
enum class asc_store_l2_cache_mode : uint8_t {};
enum class asc_dual_dst_mode : uint8_t {};
enum class asc_unit_flag_mode : uint8_t {};
enum class asc_quant_mode : uint64_t {};
enum class asc_relu_pre_mode : uint8_t {};
enum class asc_hf32_round_mode : uint8_t { NEAREST_EVEN, NEAREST_AWAY };
enum ascMutexExecuteMode { ASC_LOCK_BLOCK, ASC_LOCK_NON_BLOCK };
struct asc_fill_value_config {
  uint64_t repeat, blk_num, dst_gap;
};

namespace glass {
// A constant that a template can still compare at compile time after it was passed as an argument.
template <class Tag, int Value>
struct Constant : std::integral_constant<int, Value> {};
}  // namespace glass

#define GLASS_CONSTANT(kind, name, value) \
  inline constexpr ::glass::Constant<struct glass_##kind, value> name {}
GLASS_CONSTANT(mode, MODE_ZEROING, 0);
GLASS_CONSTANT(mode, MODE_MERGING, 1);
GLASS_CONSTANT(part, PART_EVEN, 0);
GLASS_CONSTANT(part, PART_ODD, 1);
GLASS_CONSTANT(part, PART_P0, 0);
GLASS_CONSTANT(part, PART_P1, 1);
GLASS_CONSTANT(part, PART_P2, 2);
GLASS_CONSTANT(part, PART_P3, 3);
GLASS_CONSTANT(half, LOWER, 0);
GLASS_CONSTANT(half, HIGHER, 1);
GLASS_CONSTANT(position, POS_LOWEST, 0);
GLASS_CONSTANT(position, POS_HIGHEST, 1);
GLASS_CONSTANT(order, INC_ORDER, 0);
GLASS_CONSTANT(order, DEC_ORDER, 1);
GLASS_CONSTANT(bin, Bin_N0, 0);
GLASS_CONSTANT(bin, Bin_N1, 1);
GLASS_CONSTANT(update, POST_UPDATE, 0);
GLASS_CONSTANT(round, ROUND_R, 0);  // in the order of glass::Rounding
GLASS_CONSTANT(round, ROUND_A, 1);
GLASS_CONSTANT(round, ROUND_F, 2);
GLASS_CONSTANT(round, ROUND_C, 3);
GLASS_CONSTANT(round, ROUND_Z, 4);
GLASS_CONSTANT(round, ROUND_O, 5);
GLASS_CONSTANT(saturation, RS_DISABLE, 0);
GLASS_CONSTANT(saturation, RS_ENABLE, 1);
GLASS_CONSTANT(pattern, PAT_ALLF, -1);  // a number: so many lanes from the first; the rest as glass::pattern_mask says
GLASS_CONSTANT(pattern, PAT_ALL, -2);
GLASS_CONSTANT(pattern, PAT_VL1, 1);
GLASS_CONSTANT(pattern, PAT_VL2, 2);
GLASS_CONSTANT(pattern, PAT_VL3, 3);
GLASS_CONSTANT(pattern, PAT_VL4, 4);
GLASS_CONSTANT(pattern, PAT_VL8, 8);
GLASS_CONSTANT(pattern, PAT_VL16, 16);
GLASS_CONSTANT(pattern, PAT_VL32, 32);
GLASS_CONSTANT(pattern, PAT_VL64, 64);
GLASS_CONSTANT(pattern, PAT_VL128, 128);
GLASS_CONSTANT(pattern, PAT_M3, -3);
GLASS_CONSTANT(pattern, PAT_M4, -4);
GLASS_CONSTANT(pattern, PAT_H, -5);
GLASS_CONSTANT(pattern, PAT_Q, -6);
GLASS_CONSTANT(barrier, VST_VLD, 0);  // what comes after a store must not be a load before it has happened, and so on
GLASS_CONSTANT(barrier, VLD_VST, 1);
GLASS_CONSTANT(barrier, VST_VST, 2);
GLASS_CONSTANT(barrier, VST_LD, 3);
GLASS_CONSTANT(barrier, VST_ST, 4);
GLASS_CONSTANT(barrier, VLD_ST, 5);
GLASS_CONSTANT(barrier, ST_VLD, 6);
GLASS_CONSTANT(barrier, ST_VST, 7);
GLASS_CONSTANT(barrier, LD_VST, 8);
GLASS_CONSTANT(barrier, VV_ALL, 9);
GLASS_CONSTANT(barrier, VS_ALL, 10);
GLASS_CONSTANT(barrier, SV_ALL, 11);
GLASS_CONSTANT(distribution, DINTLV_B8, 0);
GLASS_CONSTANT(distribution, DINTLV_B16, 1);
GLASS_CONSTANT(distribution, DINTLV_B32, 2);
#undef GLASS_CONSTANT

// --- small vectors of SIMT threads
// ------------------------------------------------------------------------------------
#define GLASS_VECTOR2(name, type) \
  struct alignas(2 * sizeof(type)) name { \
    type x, y; \
  };
#define GLASS_VECTOR4(name, type) \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name { \
    type x, y, z, w; \
  };
GLASS_VECTOR2(float2, float)
GLASS_VECTOR4(float4, float)
GLASS_VECTOR2(int2, int32_t)
GLASS_VECTOR4(int4, int32_t)
GLASS_VECTOR2(uint2, uint32_t)
GLASS_VECTOR4(uint4, uint32_t)
GLASS_VECTOR2(ushort2, uint16_t)
GLASS_VECTOR4(ushort4, uint16_t)
GLASS_VECTOR4(ulonglong4, unsigned long long)
GLASS_VECTOR2(half2, half)
GLASS_VECTOR2(bfloat16x2_t, bfloat16_t)
#undef GLASS_VECTOR2
#undef GLASS_VECTOR4
struct uint1 {
  uint32_t x;
};
struct ushort3 {
  uint16_t x, y, z;
};
struct uint3 {
  uint32_t x, y, z;
};

#define GLASS_LANES2(op, V) \
  inline V operator op(V a, V b) { return {a.x op b.x, a.y op b.y}; }
#define GLASS_LANES4(op, V) \
  inline V operator op(V a, V b) { return {a.x op b.x, a.y op b.y, a.z op b.z, a.w op b.w}; }
#define GLASS_ARITHMETIC(LANES, V) LANES(+, V) LANES(-, V) LANES(*, V)
#define GLASS_BITS(LANES, V) LANES(&, V) LANES(|, V) LANES(^, V) LANES(<<, V) LANES(>>, V)
GLASS_ARITHMETIC(GLASS_LANES2, float2)
GLASS_ARITHMETIC(GLASS_LANES4, float4)
GLASS_ARITHMETIC(GLASS_LANES2, int2)
GLASS_ARITHMETIC(GLASS_LANES4, int4)
GLASS_ARITHMETIC(GLASS_LANES2, uint2)
GLASS_ARITHMETIC(GLASS_LANES4, uint4)
GLASS_BITS(GLASS_LANES2, int2)
GLASS_BITS(GLASS_LANES4, int4)
GLASS_BITS(GLASS_LANES2, uint2)
GLASS_BITS(GLASS_LANES4, uint4)
#undef GLASS_LANES2
#undef GLASS_LANES4
#undef GLASS_ARITHMETIC
#undef GLASS_BITS

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
inline uint1 make_uint1(uint32_t x) { return {x}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline ushort2 make_ushort2(uint16_t x, uint16_t y) { return {x, y}; }
inline half2 make_half2(half x, half y) { return {x, y}; }
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline bfloat16x2_t __halves2bfloat162(bfloat16_t x, bfloat16_t y) { return {x, y}; }

inline float __half2float(half x) { return x; }
inline half __float2half_rn(float x) { return x; }
inline float __bfloat162float(bfloat16_t x) { return x; }
inline bfloat16_t __float2bfloat16_rn(float x) { return x; }
inline float2 __half22float2(half2 x) { return {x.x, x.y}; }
inline half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
inline float2 __bfloat1622float2(bfloat16x2_t x) { return {x.x, x.y}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 x) { return {x.x, x.y}; }

// Two bytes of eight-bit floats, the first element in the low byte.
using __asc_fp8x2_storage_t = uint16_t;
struct float8_e4m3x2_t {
  uint16_t bits;
};
struct float8_e5m2x2_t {
  uint16_t bits;
};
enum glass_fp8_saturation { __ASC_NOSAT, __ASC_SATFINITE };
enum glass_fp8_format { __ASC_E4M3, __ASC_E5M2 };
inline __asc_fp8x2_storage_t __asc_cvt_float2_to_fp8x2(float2 value, glass_fp8_saturation saturation,
                                                       glass_fp8_format format) {
  const glass::Format& to = format == __ASC_E4M3 ? glass::kE4m3 : glass::kE5m2;
  const auto bits = [&](float x) {
    return glass::encode(x, to, glass::Rounding::kNearestEven, saturation == __ASC_SATFINITE);
  };
  return static_cast<uint16_t>(bits(value.x) | bits(value.y) << 8);
}
inline float2 __e4m3x22float2(float8_e4m3x2_t x) {
  return {glass::decode(x.bits & 0xff, glass::kE4m3), glass::decode(x.bits >> 8, glass::kE4m3)};
}
inline float2 __e5m2x22float2(float8_e5m2x2_t x) {
  return {glass::decode(x.bits & 0xff, glass::kE5m2), glass::decode(x.bits >> 8, glass::kE5m2)};
}

// --- mathematics
// ------------------------------------------------------------------------------------------------------
template <class A, class B>
auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// Functions of half: those of float, rounded.
#define GLASS_OF_HALF(name) \
  inline half h##name(half x) { return name##f(x); }
GLASS_OF_HALF(sqrt)
GLASS_OF_HALF(rsqrt)
GLASS_OF_HALF(exp)
GLASS_OF_HALF(exp2)
GLASS_OF_HALF(log)
GLASS_OF_HALF(log2)
GLASS_OF_HALF(log10)
GLASS_OF_HALF(log1p)
GLASS_OF_HALF(tanh)
GLASS_OF_HALF(tan)
GLASS_OF_HALF(sin)
GLASS_OF_HALF(cos)
GLASS_OF_HALF(atan)
GLASS_OF_HALF(erf)
GLASS_OF_HALF(floor)
GLASS_OF_HALF(ceil)
GLASS_OF_HALF(round)
GLASS_OF_HALF(trunc)
#undef GLASS_OF_HALF
inline half hfabs(half x) { return fabsf(x); }
