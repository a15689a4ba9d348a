// Register calls under the compiler's own names, which keep lanes that the mask leaves out instead of making them zero.
#pragma once

#include "simd.h"

namespace glass {

using Merging = Constant<struct ::glass_mode, 1>;
#define GLASS_MERGING_BINARY(name, call) \
  template <class T, class B> \
  void name(Vec<T>& d, const Vec<T>& a, const B& b, const Mask& m, Merging) { \
    Vec<T> result; \
    call(result, a, b, m); \
    asc_select(d, result, d, m); \
  }
#define GLASS_MERGING_UNARY(name, call) \
  template <class T> \
  void name(Vec<T>& d, const Vec<T>& a, const Mask& m, Merging) { \
    Vec<T> result; \
    call(result, a, m); \
    asc_select(d, result, d, m); \
  }
// Reductions keep the lanes behind their results.
#define GLASS_MERGING_REDUCTION(name, call, results) \
  template <class D, class T> \
  void name(Vec<D>& d, const Vec<T>& a, const Mask& m, Merging) { \
    Vec<D> result; \
    call(result, a, m); \
    asc_select(d, result, d, first_lanes(sizeof(D), results)); \
  }
GLASS_MERGING_BINARY(vadd, asc_add)
GLASS_MERGING_BINARY(vsub, asc_sub)
GLASS_MERGING_BINARY(vmul, asc_mul)
GLASS_MERGING_BINARY(vdiv, asc_div)
GLASS_MERGING_BINARY(vmax, asc_max)
GLASS_MERGING_BINARY(vmin, asc_min)
GLASS_MERGING_BINARY(vand, asc_and)
GLASS_MERGING_BINARY(vor, asc_or)
GLASS_MERGING_BINARY(vxor, asc_xor)
GLASS_MERGING_BINARY(vabsdif, asc_abs_sub)
GLASS_MERGING_BINARY(vshl, asc_shiftleft)
GLASS_MERGING_BINARY(vshr, asc_shiftright)
GLASS_MERGING_BINARY(vadds, asc_add_scalar)
GLASS_MERGING_BINARY(vmuls, asc_mul_scalar)
GLASS_MERGING_BINARY(vmaxs, asc_max_scalar)
GLASS_MERGING_BINARY(vmins, asc_min_scalar)
GLASS_MERGING_BINARY(vshls, asc_shiftleft_scalar)
GLASS_MERGING_BINARY(vshrs, asc_shiftright_scalar)
GLASS_MERGING_UNARY(vexp, asc_exp)
GLASS_MERGING_UNARY(vln, asc_ln)
GLASS_MERGING_UNARY(vsqrt, asc_sqrt)
GLASS_MERGING_UNARY(vabs, asc_abs)
GLASS_MERGING_UNARY(vneg, asc_neg)
GLASS_MERGING_UNARY(vrelu, asc_relu)
GLASS_MERGING_UNARY(vnot, asc_not)
GLASS_MERGING_REDUCTION(vcadd, asc_reduce_sum, 1)
GLASS_MERGING_REDUCTION(vcmax, asc_reduce_max, 2)
GLASS_MERGING_REDUCTION(vcmin, asc_reduce_min, 2)
#undef GLASS_MERGING_BINARY
#undef GLASS_MERGING_UNARY
#undef GLASS_MERGING_REDUCTION
template <class T>
void vaxpy(Vec<T>& d, const Vec<T>& a, std::type_identity_t<T> x, const Mask& m, Merging) {
  Vec<T> result = d;
  asc_axpy(result, a, x, m);
  asc_select(d, result, d, m);
}
template <class T>
void vdup(Vec<T>& d, std::type_identity_t<T> x, const Mask& m, Merging) {
  Vec<T> result;
  asc_duplicate_scalar(result, x, m);
  asc_select(d, result, d, m);
}
template <class T, int Position>
void vdup(Vec<T>& d, const Vec<T>& a, const Mask& m, Constant<struct ::glass_position, Position>, Merging) {
  Vec<T> result;
  if constexpr (Position == 0) asc_duplicate(result, a, m);
  else asc_duplicate_highest(result, a, m);
  asc_select(d, result, d, m);
}

}  // namespace glass

using glass::vabs, glass::vabsdif, glass::vadd, glass::vadds, glass::vand, glass::vaxpy, glass::vcadd, glass::vcmax,
    glass::vcmin, glass::vcvt, glass::vdiv, glass::vdup, glass::vexp, glass::vln, glass::vmadd, glass::vmax,
    glass::vmaxs, glass::vmin, glass::vmins, glass::vmul, glass::vmula, glass::vmuls, glass::vneg, glass::vnot,
    glass::vor, glass::vrelu, glass::vshl, glass::vshls, glass::vshr, glass::vshrs, glass::vsqrt, glass::vsub,
    glass::vxor;
