// Operands are read out of their fractals as float or int32, which is exact, and multiplied; sums go along K, element
// by element, starting from C (assumed: nobody documents the order).
#include "cube.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "copies.h"
#include "findings.h"
#include "machine.h"
#include "memory.h"

namespace glass {
namespace {

constexpr int kRows = 16;  // of a fractal

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
bool is_fp4(Type type) { return type == Type::kE2M1x2 || type == Type::kE1M2x2; }

// Values of the narrow formats by their bits.
const float* table(Type type) {
  static const auto make = [](const Format& format, int count) {
    std::vector<float> values(count);
    for (int i = 0; i < count; ++i) values[i] = decode(i, format);
    return values;
  };
  static const std::vector<float> e4m3 = make(kE4m3, 256), e5m2 = make(kE5m2, 256), e2m1 = make(kE2m1, 16),
                                  e1m2 = make(kE1m2, 16);
  switch (type) {
    case Type::kE4M3: return e4m3.data();
    case Type::kE5M2: return e5m2.data();
    case Type::kE2M1x2: return e2m1.data();
    default: return e1m2.data();
  }
}

// `count` elements of one row within a fractal's 32 bytes.
void read_elements(float* to, const uint8_t* from, Type type, int count) {
  for (int i = 0; i < count; ++i) {
    uint16_t bits;
    switch (type) {
      case Type::kF32: std::memcpy(to + i, from + 4 * i, 4); break;
      case Type::kF16: std::memcpy(&bits, from + 2 * i, 2), to[i] = half_value(bits); break;
      case Type::kBF16: std::memcpy(&bits, from + 2 * i, 2), to[i] = bfloat16_value(bits); break;
      case Type::kE2M1x2:
      case Type::kE1M2x2: to[i] = table(type)[from[i / 2] >> (i % 2 * 4) & 15]; break;
      default: to[i] = table(type)[from[i]]; break;
    }
  }
}
void read_elements(int32_t* to, const uint8_t* from, Type type, int count) {
  for (int i = 0; i < count; ++i) to[i] = type == Type::kS8 ? static_cast<int8_t>(from[i]) : from[i];
}

float to_hf32(float value, bool away) {
  if (!std::isfinite(value)) return value;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + (away ? 0x800 : 0x7ff + (bits >> 12 & 1))) >> 12 << 12);
}

// An operand as a matrix [rows, k], rows rounded up to whole fractals. `unwritten`: which rows depend on bytes nobody
// wrote. `powers`: of an operand with scales, the largest scale of each row, over which its values are, so that nothing
// leaves the range of a float on its way; else empty.
template <class T>
struct Operand {
  int rows, k;
  std::vector<T> values;
  std::vector<uint8_t> unwritten;
  std::vector<double> powers;
};

template <class T>
Operand<T> read_operand(Space space, const void* pointer, Type type, int rows, int k, bool scaled) {
  const int c0 = is_fp4(type) ? 64 : 32 / bytes_of(type);
  Operand<T> operand{round_up(rows, kRows), k, {}, {}, {}};
  operand.values.resize(static_cast<size_t>(operand.rows) * k);
  operand.unwritten.assign(operand.rows, 0);
  const size_t bytes = static_cast<size_t>(round_up(k, c0)) / c0 * operand.rows * 32;
  const Bytes from = on_chip(space, pointer, bytes, Access::kRead);
  for (int column = 0; column < k; column += c0)
    for (int row = 0; row < operand.rows; ++row) {
      const size_t at = (static_cast<size_t>(column / c0) * operand.rows + row) * 32;
      const int count = std::min(c0, k - column);
      read_elements(&operand.values[static_cast<size_t>(row) * k + column], from.data + at, type, count);
      if (from.unwritten != nullptr && std::memchr(from.unwritten + at, 1, (count * 32 + c0 - 1) / c0) != nullptr)
        operand.unwritten[row] = 1;
    }
  if constexpr (std::is_same_v<T, float>) {
    if (scaled) {
      // A byte for 32 elements; fractals of 16 rows of two bytes, those of 16 rows one behind the other along K.
      const int pairs = round_up(k, 64) / 64;
      const void* at = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(pointer) / 16);
      const Bytes scales =
          on_chip(space == kL0A ? kScaleA : kScaleB, at, static_cast<size_t>(operand.rows) * pairs * 2, Access::kRead);
      for (int row = 0; row < operand.rows; ++row) {
        const auto byte_of = [&](int block) {
          return (static_cast<size_t>(row / kRows) * pairs + block / 2) * 32 + row % kRows * 2 + block % 2;
        };
        const int blocks = round_up(k, 32) / 32;
        int largest = 0;
        for (int block = 0; block < blocks; ++block)
          if (const uint8_t bits = scales.data[byte_of(block)]; bits != 0xff) largest = std::max<int>(largest, bits);
        operand.powers.push_back(std::ldexp(1.0, largest - 127));
        for (int block = 0; block < blocks; ++block) {
          const size_t byte = byte_of(block);
          const uint8_t bits = scales.data[byte];
          const float factor = bits == 0xff ? NAN : std::ldexp(1.0f, bits - largest);
          for (int i = block * 32; i < std::min(k, block * 32 + 32); ++i)
            operand.values[static_cast<size_t>(row) * k + i] *= factor;
          if (scales.unwritten != nullptr && scales.unwritten[byte] != 0) operand.unwritten[row] = 1;
        }
      }
    }
  }
  return operand;
}

// Sixteen lanes, which the compiler maps to what the machine has.
template <class T>
struct LanesOf;
template <>
struct LanesOf<float> {
  typedef float Vector __attribute__((vector_size(64)));
};
template <>
struct LanesOf<int32_t> {
  typedef uint32_t Vector __attribute__((vector_size(64)));  // wraps around
};
template <class T>
using Lanes = typename LanesOf<T>::Vector;

// c [column of fractals][rows][16] += a [rows, k] * b [16 * columns of fractals, k], of operands with scales the product
// by itself, times their powers.
template <class T>
void multiply(T* c, const Operand<T>& a, const Operand<T>& b, int m, bool clear) {
  const int k = a.k;
  const bool scaled = !a.powers.empty();
  std::vector<T> panel(static_cast<size_t>(k) * 16);
  for (int column = 0; column < b.rows; column += 16) {
    for (int i = 0; i < k; ++i)
      for (int j = 0; j < 16; ++j) panel[i * 16 + j] = b.values[static_cast<size_t>(column + j) * k + i];
    T* out = c + static_cast<size_t>(column) * a.rows;
    constexpr int kTogether = 4;  // rows whose sums stay in registers
    for (int row = 0; row < m; row += kTogether) {
      Lanes<T> sums[kTogether];
      for (int r = 0; r < kTogether; ++r) {
        if (clear || scaled) sums[r] = Lanes<T>{};
        else std::memcpy(&sums[r], out + (row + r) * 16, sizeof sums[r]);
      }
      const T* left = &a.values[static_cast<size_t>(row) * k];
      for (int i = 0; i < k; ++i) {
        Lanes<T> right;
        std::memcpy(&right, &panel[i * 16], sizeof right);
        for (int r = 0; r < kTogether; ++r) sums[r] += left[static_cast<size_t>(r) * k + i] * right;
      }
      for (int r = 0; r < kTogether && row + r < m; ++r) {
        T* place = out + (row + r) * 16;
        if (scaled)
          for (int j = 0; j < 16; ++j) {
            const T product = static_cast<T>(sums[r][j] * (a.powers[row + r] * b.powers[column + j]));
            sums[r][j] = clear ? product : place[j] + product;
          }
        std::memcpy(place, &sums[r], sizeof sums[r]);
      }
    }
  }
}

template <class T>
void run(const Product& p, int hf32) {
  Operand<T> a = read_operand<T>(kL0A, p.a, p.a_type, p.m, p.k, p.scaled);
  Operand<T> b = read_operand<T>(kL0B, p.b, p.b_type, p.n, p.k, p.scaled);
  if constexpr (std::is_same_v<T, float>) {
    if (hf32 != 0 && p.a_type == Type::kF32)
      for (Operand<T>* operand : {&a, &b})
        for (T& value : operand->values) value = to_hf32(value, hf32 == 2);
  }
  const size_t bytes = static_cast<size_t>(a.rows) * b.rows * 4;
  const Bytes c = on_chip(kL0C, p.c, bytes, p.clear ? Access::kWrite : Access::kUpdate);
  multiply(reinterpret_cast<T*>(c.data), a, b, p.m, p.clear);
  if (c.unwritten == nullptr) return;
  for (int column = 0; column < b.rows; ++column)
    for (int row = 0; row < p.m; ++row) {
      uint8_t* flags = c.unwritten + (static_cast<size_t>(column / 16) * a.rows * 16 + row * 16 + column % 16) * 4;
      const bool unwritten = a.unwritten[row] != 0 || b.unwritten[column] != 0 || (!p.clear && flags[0] != 0);
      std::memset(flags, unwritten, 4);
    }
}

bool is_integer(Type type) { return type == Type::kS8 || type == Type::kU8; }

void copy_scales(Space space, uint64_t to, const void* from, int x_start, int y_start, int x_steps, int y_steps,
                 int source_stride, int destination_stride, const char* name) {
  record_work(kMTE1, name, [=] {
    const size_t size = static_cast<size_t>(y_steps) * 32;
    for (int x = 0; x < x_steps; ++x)
      move(on_chip(space, reinterpret_cast<const void*>(to + uint64_t(x) * destination_stride * 32), size,
                   Access::kWrite),
           on_chip(kL1, static_cast<const char*>(from) + (int64_t{x_start + x} * source_stride + y_start) * 32, size,
                   Access::kRead),
           size);
  });
}

}  // namespace

void matrix_product(const Product& product) {
  const bool integers = is_integer(product.a_type);
  const bool right = product.c_type == (integers ? Type::kS32 : Type::kF32) && integers == is_integer(product.b_type) &&
                     !product.from_bias;
  if (!right) {
    Finding finding;
    finding.rule = "call";
    finding.what = std::string(product.call) + (product.from_bias ? " with a bias table" : " of these types") +
                   " is not what the runtime multiplies";
    return report(std::move(finding));
  }
  if (product.m == 0 || product.k == 0 || product.n == 0) return;
  const int hf32 = here.core->hf32;
  record_work(kM, product.call, [product, integers, hf32] {
    if (integers) run<int32_t>(product, 0);
    else run<float>(product, hf32);
  });
}

}  // namespace glass

using namespace glass;

void asc_enable_hf32() { here.core->hf32 = here.core->hf32_away ? 2 : 1; }
void asc_disable_hf32() { here.core->hf32 = 0; }
void asc_set_hf32_round_mode(asc_hf32_round_mode mode) {
  here.core->hf32_away = mode == asc_hf32_round_mode::NEAREST_AWAY;
  if (here.core->hf32 != 0) asc_enable_hf32();
}

void asc_copy_l12l0a_mx(uint64_t to, fp8_e8m0_t* from, int x_start, int y_start, int x_steps, int y_steps,
                        int source_stride, int destination_stride) {
  copy_scales(kScaleA, to, from, x_start, y_start, x_steps, y_steps, source_stride, destination_stride,
              "asc_copy_l12l0a_mx");
}
void asc_copy_l12l0b_mx(uint64_t to, fp8_e8m0_t* from, int x_start, int y_start, int x_steps, int y_steps,
                        int source_stride, int destination_stride) {
  copy_scales(kScaleB, to, from, x_start, y_start, x_steps, y_steps, source_stride, destination_stride,
              "asc_copy_l12l0b_mx");
}
