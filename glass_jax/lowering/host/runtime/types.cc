// Conversions between float and formats of at most 16 bits, for any format, rounding and end of the range.
#include "types.h"

namespace glass {
namespace {

// Whether a magnitude that lies `rest` (of `unit`, 0 < rest < unit) above a value of the format goes up to the next
// one.
bool rounds_up(uint64_t rest, uint64_t unit, bool odd, bool negative, Rounding rounding) {
  switch (rounding) {
    case Rounding::kNearestEven: return rest * 2 > unit || (rest * 2 == unit && odd);
    case Rounding::kNearestAway: return rest * 2 >= unit;
    case Rounding::kFloor: return negative;
    case Rounding::kCeil: return !negative;
    case Rounding::kTruncate: return false;
    case Rounding::kOdd: return !odd;
  }
  return false;
}

uint32_t largest(const Format& format) {
  const uint32_t ones = (1u << (format.exponent_bits + format.mantissa_bits)) - 1;
  if (format.infinities) return (ones >> format.mantissa_bits << format.mantissa_bits) - 1;
  return format.nans ? ones - 1 : ones;
}

}  // namespace

uint32_t encode(float value, const Format& format, Rounding rounding, bool saturate) {
  const uint32_t source = std::bit_cast<uint32_t>(value);
  const uint32_t sign = source >> 31 << (format.exponent_bits + format.mantissa_bits);
  const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  const uint32_t ones = (1u << (format.exponent_bits + format.mantissa_bits)) - 1;
  const uint32_t beyond = saturate || !(format.infinities || format.nans) ? largest(format)
                          : format.infinities                             ? infinity
                                                                          : ones;
  if (value != value) {
    if (!format.nans) return 0;  // assumed: what has no NaN gets zero
    return sign | (format.infinities ? infinity | 1u << (format.mantissa_bits - 1) : ones);
  }
  if (std::isinf(value)) return sign | beyond;
  uint64_t magnitude = source & 0x7fffffff;
  if (magnitude == 0) return sign;
  // The value as `mantissa` * 2 ** `exponent`, then in units of the last place of the format.
  int exponent = static_cast<int>(magnitude >> 23);
  uint64_t mantissa = magnitude & 0x7fffff;
  if (exponent == 0) exponent = 1;
  else mantissa |= 0x800000;
  exponent -= 127 + 23;
  const int width = 64 - std::countl_zero(mantissa);
  const int smallest = 1 - format.bias - format.mantissa_bits;  // exponent of the last place of subnormals
  int place = exponent + width - 1 - format.mantissa_bits;
  if (place < smallest) place = smallest;
  const int shift = place - exponent;
  uint64_t whole;
  if (shift <= 0) {
    whole = mantissa << -shift;
  } else if (shift > 40) {
    whole = rounds_up(1, uint64_t{1} << 40, false, sign, rounding);
  } else {
    const uint64_t unit = uint64_t{1} << shift, rest = mantissa & (unit - 1);
    whole = mantissa >> shift;
    if (rest != 0 && rounds_up(rest, unit, whole & 1, sign, rounding)) ++whole;
  }
  // A carry out of the mantissa lands in the exponent, where it belongs.
  const uint64_t bits = whole + (static_cast<uint64_t>(place - smallest) << format.mantissa_bits);
  if (bits <= largest(format)) return sign | static_cast<uint32_t>(bits);
  const bool inward = rounding == Rounding::kTruncate || (rounding == Rounding::kFloor && !sign) ||
                      (rounding == Rounding::kCeil && sign) || rounding == Rounding::kOdd;
  return sign | (inward ? largest(format) : beyond);
}

float decode(uint32_t bits, const Format& format) {
  const uint32_t sign = bits >> (format.exponent_bits + format.mantissa_bits) & 1;
  const uint32_t ones = (1u << (format.exponent_bits + format.mantissa_bits)) - 1;
  const uint32_t magnitude = bits & ones;
  const int exponent = static_cast<int>(magnitude >> format.mantissa_bits);
  const uint32_t mantissa = magnitude & ((1u << format.mantissa_bits) - 1);
  float value;
  if (format.infinities && exponent == (1 << format.exponent_bits) - 1) {
    value = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else if (!format.infinities && format.nans && magnitude == ones) {
    value = std::numeric_limits<float>::quiet_NaN();
  } else {
    const uint32_t whole = exponent ? mantissa | 1u << format.mantissa_bits : mantissa;
    value = std::ldexp(static_cast<float>(whole), (exponent ? exponent : 1) - format.bias - format.mantissa_bits);
  }
  return sign ? -value : value;
}

}  // namespace glass
