// Element types of the NPU: their bits, and their values as float. Arithmetic on 16-bit types rounds after each
// operation.
#pragma once

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace glass {

// How a float becomes a narrow type when it lies between two of its values, and when it lies beyond the largest.
enum class Rounding : uint8_t { kNearestEven, kNearestAway, kFloor, kCeil, kTruncate, kOdd };

// A binary format of at most 16 bits. Without infinities, all ones is NaN (and the exponent of all ones counts as any
// other).
struct Format {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool infinities;
  bool nans;
};
inline constexpr Format kHalf{5, 10, 15, true, true};
inline constexpr Format kBfloat16{8, 7, 127, true, true};
inline constexpr Format kE4m3{4, 3, 7, false, true};
inline constexpr Format kE5m2{5, 2, 15, true, true};
inline constexpr Format kE2m1{2, 1, 1, false, false};
inline constexpr Format kE1m2{1, 2, 1, false, false};

// The bits of `value`; beyond the largest: the largest if it saturates or the format has nothing larger, else infinity
// or NaN.
uint32_t encode(float value, const Format& format, Rounding rounding, bool saturate);
float decode(uint32_t bits, const Format& format);

inline uint16_t half_bits(float value) { return std::bit_cast<uint16_t>(static_cast<_Float16>(value)); }
inline float half_value(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline uint16_t bfloat16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bfloat16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// A 16-bit float. Sums, products and quotients of float, rounded once more, are rounded right: 24 >= 2 * 11 + 2 bits.
template <uint16_t (*Bits)(float), float (*Value)(uint16_t)>
struct Float16 {
  uint16_t bits;

  Float16() = default;
  template <class T>
    requires std::is_arithmetic_v<T>
  Float16(T value) : bits(Bits(static_cast<float>(value))) {}
  operator float() const { return Value(bits); }

  friend Float16 operator+(Float16 a, Float16 b) { return float(a) + float(b); }
  friend Float16 operator-(Float16 a, Float16 b) { return float(a) - float(b); }
  friend Float16 operator*(Float16 a, Float16 b) { return float(a) * float(b); }
  friend Float16 operator/(Float16 a, Float16 b) { return float(a) / float(b); }
  friend bool operator==(Float16 a, Float16 b) { return float(a) == float(b); }
  friend bool operator!=(Float16 a, Float16 b) { return float(a) != float(b); }
  friend bool operator<(Float16 a, Float16 b) { return float(a) < float(b); }
  friend bool operator>(Float16 a, Float16 b) { return float(a) > float(b); }
  friend bool operator<=(Float16 a, Float16 b) { return float(a) <= float(b); }
  friend bool operator>=(Float16 a, Float16 b) { return float(a) >= float(b); }
  Float16 operator-() const { return std::bit_cast<Float16>(static_cast<uint16_t>(bits ^ 0x8000)); }
  Float16& operator+=(Float16 b) { return *this = *this + b; }
  Float16& operator-=(Float16 b) { return *this = *this - b; }
  Float16& operator*=(Float16 b) { return *this = *this * b; }
  Float16& operator/=(Float16 b) { return *this = *this / b; }
};

// Eight bits, or two of four: no arithmetic, only a value.
struct Byte {
  uint8_t bits;
};

}  // namespace glass

using half = glass::Float16<glass::half_bits, glass::half_value>;
using bfloat16_t = glass::Float16<glass::bfloat16_bits, glass::bfloat16_value>;
struct float8_e4m3_t : glass::Byte {
  operator float() const { return glass::decode(bits, glass::kE4m3); }
};
struct float8_e5m2_t : glass::Byte {
  operator float() const { return glass::decode(bits, glass::kE5m2); }
};
struct float8_e8m0_t : glass::Byte {};    // 2 to the power of bits - 127; 255 is NaN
struct float4_e2m1x2_t : glass::Byte {};  // the first element in the low four bits
struct float4_e1m2x2_t : glass::Byte {};
using fp8_e8m0_t = float8_e8m0_t;
using fp8_e4m3fn_t = float8_e4m3_t;
using fp8_e5m2_t = float8_e5m2_t;
using fp4x2_e2m1_t = float4_e2m1x2_t;
using fp4x2_e1m2_t = float4_e1m2x2_t;

namespace glass {

// Names of element types for the parts of the runtime that are compiled once.
enum class Type : uint8_t {
  kF32,
  kF16,
  kBF16,
  kE4M3,
  kE5M2,
  kE8M0,
  kE2M1x2,
  kE1M2x2,
  kS8,
  kU8,
  kS16,
  kU16,
  kS32,
  kU32,
  kS64,
  kU64
};

template <class T>
constexpr Type type_of() {
  if constexpr (std::is_same_v<T, float>) return Type::kF32;
  else if constexpr (std::is_same_v<T, half>) return Type::kF16;
  else if constexpr (std::is_same_v<T, bfloat16_t>) return Type::kBF16;
  else if constexpr (std::is_same_v<T, float8_e4m3_t>) return Type::kE4M3;
  else if constexpr (std::is_same_v<T, float8_e5m2_t>) return Type::kE5M2;
  else if constexpr (std::is_same_v<T, float8_e8m0_t>) return Type::kE8M0;
  else if constexpr (std::is_same_v<T, float4_e2m1x2_t>) return Type::kE2M1x2;
  else if constexpr (std::is_same_v<T, float4_e1m2x2_t>) return Type::kE1M2x2;
  else if constexpr (std::is_same_v<T, int8_t>) return Type::kS8;
  else if constexpr (std::is_same_v<T, uint8_t>) return Type::kU8;
  else if constexpr (std::is_same_v<T, int16_t>) return Type::kS16;
  else if constexpr (std::is_same_v<T, uint16_t>) return Type::kU16;
  else if constexpr (std::is_same_v<T, int32_t>) return Type::kS32;
  else if constexpr (std::is_same_v<T, uint32_t>) return Type::kU32;
  else if constexpr (std::is_same_v<T, int64_t>) return Type::kS64;
  else if constexpr (std::is_same_v<T, uint64_t>) return Type::kU64;
  else static_assert(sizeof(T) == 0, "no element type of the NPU");
}

inline int bytes_of(Type type) {
  switch (type) {
    case Type::kF32:
    case Type::kS32:
    case Type::kU32: return 4;
    case Type::kF16:
    case Type::kBF16:
    case Type::kS16:
    case Type::kU16: return 2;
    case Type::kS64:
    case Type::kU64: return 8;
    default: return 1;
  }
}

template <class T>
inline constexpr bool kIsFloat = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>;

}  // namespace glass
