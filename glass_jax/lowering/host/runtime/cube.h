// Matrix products of the cube unit.
#pragma once

#include "device.h"

namespace glass {
struct Product {
  void* c;
  const void* a;
  const void* b;
  int m, k, n;
  bool from_bias, clear, scaled;
  Type c_type, a_type, b_type;
  const char* call;
};
void matrix_product(const Product& product);
}  // namespace glass

template <class C, class A, class B>
void asc_mmad(C* c, A* a, B* b, int m, int k, int n, int, bool, bool from_bias, bool clear) {
  glass::matrix_product({c, a, b, m, k, n, from_bias, clear, false, glass::type_of<C>(), glass::type_of<A>(),
                         glass::type_of<B>(), "asc_mmad"});
}
// The scale factors lie in the memories beside L0A and L0B, at a sixteenth of the operands' addresses.
template <class C, class A, class B>
void asc_mmad_mx(C* c, A* a, B* b, int m, int k, int n, int, bool, bool from_bias, bool clear) {
  glass::matrix_product({c, a, b, m, k, n, from_bias, clear, true, glass::type_of<C>(), glass::type_of<A>(),
                         glass::type_of<B>(), "asc_mmad_mx"});
}

// Products of float with operands rounded to HF32: 8 bits of exponent, 11 of mantissa.
void asc_enable_hf32();
void asc_disable_hf32();
void asc_set_hf32_round_mode(asc_hf32_round_mode mode);
// The order in which the unit goes through C: of no effect on values.
inline void asc_set_mmad_direction_m() {}
inline void asc_set_mmad_direction_n() {}
