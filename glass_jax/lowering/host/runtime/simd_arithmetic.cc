// Lane by lane: arithmetic, logic, shifts. Floats that narrow round once; integers wrap around.
#include <cmath>

#include "simd_lanes.h"
#include "simd_types.h"

namespace glass {
namespace {

template <class T>
T to_lane(float value) {
  return T(value);
}

// With a NaN, NaN; +0 is larger than -0.
template <class T>
T larger(T a, T b) {
  if constexpr (kIsFloat<T>) {
    if (a != a || b != b) return T(std::numeric_limits<float>::quiet_NaN());
    if (a == b) return std::signbit(float(a)) ? b : a;
  }
  return a > b ? a : b;
}
template <class T>
T smaller(T a, T b) {
  if constexpr (kIsFloat<T>) {
    if (a != a || b != b) return T(std::numeric_limits<float>::quiet_NaN());
    if (a == b) return std::signbit(float(a)) ? a : b;
  }
  return a < b ? a : b;
}

template <class T>
T quotient(T a, T b) {
  if constexpr (kIsFloat<T>) {
    return T(a / b);
  } else {
    if (b == 0) return T(-1);  // assumed: all bits set
    if constexpr (std::is_signed_v<T>)
      if (b == T(-1)) return T(-static_cast<std::make_unsigned_t<T>>(a));
    return T(a / b);
  }
}

template <class T>
using Unsigned = std::make_unsigned_t<
    std::conditional_t<std::is_integral_v<T>, T, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>>;
template <class T>
Unsigned<T> raw(T value) {
  return std::bit_cast<Unsigned<T>>(value);
}
template <class T>
T cooked(Unsigned<T> bits) {
  return std::bit_cast<T>(bits);
}

// Sums and products of integers without the overflow that C++ leaves undefined.
template <class T, class F>
T wrapped(T a, T b, F f) {
  if constexpr (kIsFloat<T>) return T(f(a, b));
  else return static_cast<T>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
}
template <class T>
T sum(T a, T b) {
  return wrapped(a, b, [](auto x, auto y) { return x + y; });
}
template <class T>
T difference(T a, T b) {
  return wrapped(a, b, [](auto x, auto y) { return x - y; });
}
template <class T>
T product(T a, T b) {
  return wrapped(a, b, [](auto x, auto y) { return x * y; });
}

template <class T>
T negated(T a) {
  if constexpr (kIsFloat<T>) return -a;
  else return difference(T(0), a);
}
template <class T>
T magnitude(T a) {
  if constexpr (kIsFloat<T>) return cooked<T>(raw(a) & static_cast<Unsigned<T>>(Unsigned<T>(-1) >> 1));
  else return a < 0 ? negated(a) : a;
}

// a * b + c with one rounding.
float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
template <class T>
T multiply_add(T a, T b, T c) {
  return T(static_cast<float>(static_cast<double>(float(a)) * float(b) + float(c)));
}

// A signed number keeps its sign when it is shifted left.
template <class T>
T shifted_left(T a, int64_t by) {
  constexpr int kBits = 8 * sizeof(T);
  if (by < 0 || by >= kBits) return 0;
  const auto shifted = static_cast<Unsigned<T>>(raw(a) << by);
  if constexpr (!std::is_signed_v<T>) return shifted;
  constexpr Unsigned<T> sign = Unsigned<T>(1) << (kBits - 1);
  return cooked<T>((shifted & static_cast<Unsigned<T>>(~sign)) | (raw(a) & sign));
}
template <class T>
T shifted_right(T a, int64_t by) {
  if (by < 0 || by >= static_cast<int64_t>(8 * sizeof(T))) return a < 0 ? T(-1) : T(0);
  return static_cast<T>(a >> by);
}

}  // namespace

#define GLASS_BINARY(name, expression) \
  template <class T> \
  void name(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m) { \
    const uint64_t depends[4] = GLASS_DEPENDS2(a, b); \
    for_lanes(d, m, depends, [&](int i) -> T { \
      const T x = a.lanes()[i], y = b.lanes()[i]; \
      return expression; \
    }); \
  }
#define GLASS_SCALAR(name, expression) \
  template <class T> \
  void name(Vec<T>& d, const Vec<T>& a, std::type_identity_t<T> y, const Mask& m) { \
    for_lanes(d, m, a.unwritten, [&](int i) -> T { \
      const T x = a.lanes()[i]; \
      return expression; \
    }); \
  }
#define GLASS_UNARY(name, expression) \
  template <class T> \
  void name(Vec<T>& d, const Vec<T>& a, const Mask& m) { \
    for_lanes(d, m, a.unwritten, [&](int i) -> T { \
      const T x = a.lanes()[i]; \
      return expression; \
    }); \
  }
GLASS_BINARY(asc_add, sum(x, y))
GLASS_BINARY(asc_sub, difference(x, y))
GLASS_BINARY(asc_mul, product(x, y))
GLASS_BINARY(asc_div, quotient(x, y))
GLASS_BINARY(asc_max, larger(x, y))
GLASS_BINARY(asc_min, smaller(x, y))
GLASS_BINARY(asc_and, cooked<T>(raw(x) & raw(y)))
GLASS_BINARY(asc_or, cooked<T>(raw(x) | raw(y)))
GLASS_BINARY(asc_xor, cooked<T>(raw(x) ^ raw(y)))
GLASS_BINARY(asc_abs_sub, magnitude(difference(x, y)))
GLASS_BINARY(asc_prelu, x > T(0) ? x : product(x, y))
GLASS_SCALAR(asc_add_scalar, sum(x, y))
GLASS_SCALAR(asc_mul_scalar, product(x, y))
GLASS_SCALAR(asc_max_scalar, larger(x, y))
GLASS_SCALAR(asc_min_scalar, smaller(x, y))
GLASS_SCALAR(asc_leakyrelu, x > T(0) ? x : product(x, y))
GLASS_UNARY(asc_exp, to_lane<T>(std::exp(float(x))))
GLASS_UNARY(asc_ln, to_lane<T>(std::log(float(x))))
GLASS_UNARY(asc_sqrt, to_lane<T>(std::sqrt(float(x))))
GLASS_UNARY(asc_abs, magnitude(x))
GLASS_UNARY(asc_neg, negated(x))
GLASS_UNARY(asc_relu, x < T(0) ? T(0) : x)
GLASS_UNARY(asc_not, cooked<T>(static_cast<Unsigned<T>>(~raw(x))))
#undef GLASS_BINARY
#undef GLASS_SCALAR
#undef GLASS_UNARY

// d * a + b.
template <class T>
void asc_madd(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m) {
  const Vec<T> old = d;
  uint64_t depends[4] = GLASS_DEPENDS2(a, b);
  for (int w = 0; w < 4; ++w) depends[w] |= old.unwritten[w];
  for_lanes(d, m, depends, [&](int i) { return multiply_add(old.lanes()[i], a.lanes()[i], b.lanes()[i]); });
}

// a * x + d.
template <class T>
void asc_axpy(Vec<T>& d, const Vec<T>& a, std::type_identity_t<T> x, const Mask& m) {
  const Vec<T> old = d;
  const uint64_t depends[4] = GLASS_DEPENDS2(a, old);
  for_lanes(d, m, depends, [&](int i) { return multiply_add(a.lanes()[i], x, old.lanes()[i]); });
}

template <class T>
void fused(Vec<T>& d, const Vec<T>& a, const Vec<T>& b, const Mask& m, bool add_to_product) {
  const Vec<T> old = d;
  uint64_t depends[4] = GLASS_DEPENDS2(a, b);
  for (int w = 0; w < 4; ++w) depends[w] |= old.unwritten[w];
  Vec<T> result;
  for_lanes(result, m, depends, [&](int i) {
    return add_to_product ? multiply_add(a.lanes()[i], old.lanes()[i], b.lanes()[i])
                          : multiply_add(a.lanes()[i], b.lanes()[i], old.lanes()[i]);
  });
  asc_select(d, result, old, m);
}

template <class T, class I>
void asc_shiftleft(Vec<T>& d, const Vec<T>& a, const Vec<I>& by, const Mask& m) {
  const uint64_t depends[4] = GLASS_DEPENDS2(a, by);
  for_lanes(d, m, depends, [&](int i) { return shifted_left(a.lanes()[i], by.lanes()[i]); });
}
template <class T, class I>
void asc_shiftright(Vec<T>& d, const Vec<T>& a, const Vec<I>& by, const Mask& m) {
  const uint64_t depends[4] = GLASS_DEPENDS2(a, by);
  for_lanes(d, m, depends, [&](int i) { return shifted_right(a.lanes()[i], by.lanes()[i]); });
}
template <class T>
void asc_shiftleft_scalar(Vec<T>& d, const Vec<T>& a, int16_t by, const Mask& m) {
  for_lanes(d, m, a.unwritten, [&](int i) { return shifted_left(a.lanes()[i], by); });
}
template <class T>
void asc_shiftright_scalar(Vec<T>& d, const Vec<T>& a, int16_t by, const Mask& m) {
  for_lanes(d, m, a.unwritten, [&](int i) { return shifted_right(a.lanes()[i], by); });
}

void asc_exp_sub(Vec<float>& d, const Vec<float>& a, const Vec<float>& b, const Mask& m) {
  const uint64_t depends[4] = GLASS_DEPENDS2(a, b);
  for_lanes(d, m, depends, [&](int i) { return std::exp(a.lanes()[i] - b.lanes()[i]); });
}
void asc_exp_sub(Vec<float>& d, const Vec<half>& a, const Vec<half>& b, const Mask& m) {
  const uint64_t depends[4] = GLASS_DEPENDS2(a, b);
  for_lanes(d, m, depends, [&](int i) { return std::exp(float(a.lanes()[2 * i]) - float(b.lanes()[2 * i])); });
}

namespace {

// a + b + carried, lane by lane of 32 bits, and the carries.
template <class F>
void add_with_carry(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& m, F f) {
  Mask carries{};
  const uint64_t depends[4] = GLASS_DEPENDS2(a, b);
  Vec<uint32_t> result;
  for_lanes(result, m, depends, [&](int i) {
    const uint64_t whole = f(i);
    if (m.at(4 * i)) carries.set(4 * i, whole >> 32 & 1);
    return static_cast<uint32_t>(whole);
  });
  for (int w = 0; w < 4; ++w) carries.unwritten[w] = any_of_lane<4>(result.unwritten[w]);
  d = result, carry = carries;
}

}  // namespace

void asc_add(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& m) {
  add_with_carry(carry, d, a, b, m, [&](int i) { return uint64_t{a.lanes()[i]} + b.lanes()[i]; });
}
void asc_sub(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& m) {
  add_with_carry(carry, d, a, b, m, [&](int i) { return uint64_t{a.lanes()[i]} + uint32_t(~b.lanes()[i]) + 1; });
}
void asc_addc(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& carried,
              const Mask& m) {
  const Mask in = carried;
  add_with_carry(carry, d, a, b, m, [&](int i) { return uint64_t{a.lanes()[i]} + b.lanes()[i] + in.at(4 * i); });
}
void asc_subc(Mask& carry, Vec<uint32_t>& d, const Vec<uint32_t>& a, const Vec<uint32_t>& b, const Mask& carried,
              const Mask& m) {
  const Mask in = carried;
  add_with_carry(carry, d, a, b, m,
                 [&](int i) { return uint64_t{a.lanes()[i]} + uint32_t(~b.lanes()[i]) + in.at(4 * i); });
}

template <class T>
void asc_mull(Vec<T>& low, Vec<T>& high, const Vec<T>& a, const Vec<T>& b, const Mask& m) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  const uint64_t depends[4] = GLASS_DEPENDS2(a, b);
  const auto wide = [](T x, T y) { return Wide(x) * Wide(y); };
  Vec<T> l, h;
  for_lanes(l, m, depends, [&](int i) { return static_cast<T>(wide(a.lanes()[i], b.lanes()[i])); });
  for_lanes(h, m, depends, [&](int i) { return static_cast<T>(wide(a.lanes()[i], b.lanes()[i]) >> 32); });
  low = l, high = h;
}

#define GLASS_MAKE_BINARY(name, T) template void name(Vec<T>&, const Vec<T>&, const Vec<T>&, const Mask&);
#define GLASS_MAKE_SCALAR(name, T) template void name(Vec<T>&, const Vec<T>&, std::type_identity_t<T>, const Mask&);
#define GLASS_MAKE_UNARY(name, T) template void name(Vec<T>&, const Vec<T>&, const Mask&);
#define X(T) \
  GLASS_MAKE_BINARY(asc_add, T) \
  GLASS_MAKE_BINARY(asc_sub, T) GLASS_MAKE_BINARY(asc_mul, T) GLASS_MAKE_BINARY(asc_div, T) \
      GLASS_MAKE_BINARY(asc_max, T) GLASS_MAKE_BINARY(asc_min, T) GLASS_MAKE_SCALAR(asc_add_scalar, T) \
          GLASS_MAKE_SCALAR(asc_mul_scalar, T) GLASS_MAKE_SCALAR(asc_max_scalar, T) \
              GLASS_MAKE_SCALAR(asc_min_scalar, T) GLASS_MAKE_BINARY(asc_and, T) GLASS_MAKE_BINARY(asc_or, T) \
                  GLASS_MAKE_BINARY(asc_xor, T) GLASS_MAKE_UNARY(asc_not, T)
GLASS_NUMBERS(X)
#undef X
#define X(T) \
  GLASS_MAKE_BINARY(asc_abs_sub, T) \
  GLASS_MAKE_BINARY(asc_prelu, T) GLASS_MAKE_BINARY(asc_madd, T) GLASS_MAKE_SCALAR(asc_leakyrelu, T) \
      GLASS_MAKE_SCALAR(asc_axpy, T) GLASS_MAKE_UNARY(asc_exp, T) GLASS_MAKE_UNARY(asc_ln, T) \
          GLASS_MAKE_UNARY(asc_sqrt, T)
GLASS_FLOATS(X)
#undef X
#define X(T) template void fused(Vec<T>&, const Vec<T>&, const Vec<T>&, const Mask&, bool);
GLASS_ALL_FLOATS(X)
#undef X
#define X(T) GLASS_MAKE_UNARY(asc_abs, T) GLASS_MAKE_UNARY(asc_neg, T) GLASS_MAKE_UNARY(asc_relu, T)
GLASS_FLOATS(X)
GLASS_SIGNED(X)
#undef X
#define X(T) \
  template void asc_shiftleft_scalar(Vec<T>&, const Vec<T>&, int16_t, const Mask&); \
  template void asc_shiftright_scalar(Vec<T>&, const Vec<T>&, int16_t, const Mask&); \
  template void asc_shiftleft(Vec<T>&, const Vec<T>&, const Vec<std::make_signed_t<T>>&, const Mask&); \
  template void asc_shiftright(Vec<T>&, const Vec<T>&, const Vec<std::make_signed_t<T>>&, const Mask&);
GLASS_SIGNED(X)
GLASS_UNSIGNED(X)
#undef X
template void asc_mull(Vec<int32_t>&, Vec<int32_t>&, const Vec<int32_t>&, const Vec<int32_t>&, const Mask&);
template void asc_mull(Vec<uint32_t>&, Vec<uint32_t>&, const Vec<uint32_t>&, const Vec<uint32_t>&, const Mask&);

}  // namespace glass
