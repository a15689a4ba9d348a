// Conversions between lane types. A wide lane and the narrow ones below it go together: lane i of the wide type and
// lane i * ratio + part of the narrow; the mask's bit is that of the wide lane (assumed; kernels pass masks that are
// all set).
#include <cmath>
#include <utility>

#include "simd_lanes.h"

namespace glass {
namespace {

const Format& format_of(Type type) {
  switch (type) {
    case Type::kF16: return kHalf;
    case Type::kBF16: return kBfloat16;
    case Type::kE4M3: return kE4m3;
    case Type::kE5M2: return kE5m2;
    case Type::kE2M1x2: return kE2m1;
    default: return kE1m2;
  }
}

bool is_integer(Type type) { return type >= Type::kS8; }
bool is_pair(Type type) { return type == Type::kE2M1x2 || type == Type::kE1M2x2; }

// Smallest and largest integer of a type.
std::pair<int64_t, int64_t> range_of(Type type) {
  const int bits = 8 * bytes_of(type);
  switch (type) {
    case Type::kU8:
    case Type::kU16:
    case Type::kU32: return {0, (int64_t{1} << bits) - 1};
    default:
      return {bits == 64 ? INT64_MIN : -(int64_t{1} << (bits - 1)),
              bits == 64 ? INT64_MAX : (int64_t{1} << (bits - 1)) - 1};
  }
}

double rounded(double value, Rounding rounding) {
  switch (rounding) {
    case Rounding::kNearestEven: return std::nearbyint(value);
    case Rounding::kNearestAway: return std::round(value);
    case Rounding::kFloor: return std::floor(value);
    case Rounding::kCeil: return std::ceil(value);
    case Rounding::kTruncate: return std::trunc(value);
    case Rounding::kOdd: {
      const double down = std::floor(value);
      return down == value || std::fmod(down, 2) != 0 ? down : down + 1;
    }
  }
  return value;
}

int64_t read_integer(const uint8_t* from, Type type) {
  int64_t value = 0;
  const int bits = 8 * bytes_of(type);
  std::memcpy(&value, from, bits / 8);
  if (range_of(type).first < 0 && bits < 64) value = value << (64 - bits) >> (64 - bits);
  return value;
}

float read_float(const uint8_t* from, Type type) {
  float value;
  uint16_t bits;
  switch (type) {
    case Type::kF32: std::memcpy(&value, from, 4); return value;
    case Type::kF16: std::memcpy(&bits, from, 2); return half_value(bits);
    case Type::kBF16: std::memcpy(&bits, from, 2); return bfloat16_value(bits);
    default: return decode(*from, format_of(type));
  }
}

// Beyond the range: the nearest end if it saturates, else (assumed) the low bits. NaN is 0.
void write_integer(uint8_t* to, Type type, double value, const Conversion& c) {
  const auto [low, high] = range_of(type);
  int64_t whole = 0;
  if (value == value) {
    const double whole_value = rounded(value, c.rounding);
    whole = whole_value >= 9223372036854775808.0    ? INT64_MAX
            : whole_value <= -9223372036854775808.0 ? INT64_MIN
                                                    : static_cast<int64_t>(whole_value);
    if (c.saturate) whole = std::clamp(whole, low, high);
  }
  std::memcpy(to, &whole, bytes_of(type));
}

void write_float(uint8_t* to, Type type, float value, const Conversion& c) {
  if (type == Type::kF32) {
    std::memcpy(to, &value, 4);
    return;
  }
  const uint32_t bits = encode(value, format_of(type), c.rounding, c.saturate);
  std::memcpy(to, &bits, bytes_of(type));
}

void convert_lane(uint8_t* to, const uint8_t* from, const Conversion& c) {
  if (is_integer(c.from)) {
    const int64_t value = read_integer(from, c.from);
    if (is_integer(c.to)) {
      const auto [low, high] = range_of(c.to);
      const int64_t kept = c.saturate ? std::clamp(value, low, high) : value;
      std::memcpy(to, &kept, bytes_of(c.to));
    } else if (c.to == Type::kF32) {
      // Integers of more than 24 bits are rounded as the call says.
      float nearest = static_cast<float>(value);
      const double exact = static_cast<double>(value);
      const bool above = static_cast<double>(nearest) > exact, below = static_cast<double>(nearest) < exact;
      const bool toward_zero = c.rounding == Rounding::kTruncate;
      if (above && (c.rounding == Rounding::kFloor || (toward_zero && value > 0)))
        nearest = std::nextafter(nearest, -INFINITY);
      if (below && (c.rounding == Rounding::kCeil || (toward_zero && value < 0)))
        nearest = std::nextafter(nearest, INFINITY);
      write_float(to, c.to, nearest, c);
    } else {
      write_float(to, c.to, static_cast<float>(value), c);
    }
  } else if (is_integer(c.to)) {
    write_integer(to, c.to, read_float(from, c.from), c);
  } else {
    write_float(to, c.to, read_float(from, c.from), c);
  }
}

// Two of four bits to or from two neighbouring lanes of 16 bits; a byte lies under four lanes' bytes.
void convert_pairs(Register& d, const Register& a, const Mask& m, const Conversion& c) {
  const bool narrow = is_pair(c.to);
  const Format& format = format_of(narrow ? c.to : c.from);
  for (int i = 0; i < 64; ++i) {
    if (!m.at(4 * i)) continue;
    const int byte = 4 * i + c.part;
    for (int j = 0; j < 2; ++j) {
      const int wide = 4 * i + 2 * j;
      if (narrow) {
        if (j == 0) d.bytes[byte] = 0, set_bits(d.unwritten, byte, 1, false);
        d.bytes[byte] |=
            static_cast<uint8_t>(encode(read_float(a.bytes + wide, c.from), format, c.rounding, true) << (4 * j));
        if (bit(a.unwritten, wide)) set_bits(d.unwritten, byte, 1, true);
      } else {
        write_float(d.bytes + wide, c.to, decode(a.bytes[byte] >> (4 * j) & 15, format), c);
        set_bits(d.unwritten, wide, 2, bit(a.unwritten, byte));
      }
    }
  }
}

}  // namespace

void convert(Register& d, const Register& a, const Mask& m, const Conversion& c) {
  Register result;
  if (c.merge) result = d;
  else clear(result);
  if (is_pair(c.to) || is_pair(c.from)) {
    convert_pairs(result, a, m, c);
  } else {
    const int to = bytes_of(c.to), from = bytes_of(c.from), wide = std::max(to, from);
    for (int i = 0; i < 256 / wide; ++i) {
      if (!m.at(i * wide)) continue;
      const int target = to < from ? i * wide + c.part * to : i * wide,
                source = from < to ? i * wide + c.part * from : i * wide;
      convert_lane(result.bytes + target, a.bytes + source, c);
      set_bits(result.unwritten, target, to, bit(a.unwritten, source) || bit(a.unwritten, source + from - 1));
    }
  }
  for (int w = 0; w < 4; ++w) {
    // Lanes that were chosen by a mask nobody wrote.
    result.unwritten[w] |= spread<4>(m.unwritten[w]);
  }
  d = result;
}

}  // namespace glass
