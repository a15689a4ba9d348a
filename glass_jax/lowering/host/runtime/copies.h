// Copies between memories, and the registers that they take parameters from.
#pragma once

#include "device.h"

namespace glass {
struct ToNz {
  const void* source;
  void* destination;
  uint64_t rows, columns, pitch;
  bool transposed;
};
void copy_to_nz(const ToNz& copy, Type type);
enum class Fractals : uint8_t { kToL0A, kToL0B, kToL0ATransposed, kToL0BTransposed };
struct FractalCopy {
  void* destination;
  const void* source;
  int m_start, k_start, m_steps, k_steps, source_stride, destination_stride;
};
void copy_fractals(Fractals kind, const FractalCopy& copy, Type type);
void fill_l1(void* destination, uint32_t value, int bytes, const asc_fill_value_config& config);
void copy_global_to_ub(void* destination, const void* source, int bursts, uint32_t length, int left, int right,
                       bool constant, uint64_t source_stride, uint64_t destination_stride, int bytes);
struct FromL0C {
  void* destination;
  const void* source;
  int columns, rows;
  uint32_t destination_stride;
  int source_stride;
  int dual, second;  // to UB: which halves go to which vector core; without that, whether all goes to the second
  uint64_t quantization;
  int relu;
  Type to, from;
  const char* call;
};
void copy_from_l0c(const FromL0C& copy, bool to_ub);
}  // namespace glass

void asc_set_gm2l1_nz_para(uint64_t matrices, uint64_t row_stride, uint64_t column_stride, uint64_t matrix_stride);
inline void asc_set_l0c_copy_nz_para(uint64_t, uint64_t, uint64_t) {
}  // of copies of several matrices at once; always one
void asc_set_copy_pad_val(uint32_t value);

template <class T>
void asc_copy_gm2l1_nd2nz(T* to, T* from, uint64_t pitch, asc_load_l2_cache_mode, uint64_t rows, uint64_t columns,
                          uint64_t, bool) {
  glass::copy_to_nz({from, to, rows, columns, pitch, false}, glass::type_of<T>());
}
template <class T>
void asc_copy_gm2l1_dn2nz(T* to, T* from, uint64_t pitch, asc_load_l2_cache_mode, uint64_t rows, uint64_t columns,
                          uint64_t, bool) {
  glass::copy_to_nz({from, to, rows, columns, pitch, true}, glass::type_of<T>());
}

#define GLASS_FRACTALS(name, kind) \
  template <class T> \
  void name(T* to, T* from, int m_start, int k_start, int m_steps, int k_steps, int source_stride, \
            int destination_stride) { \
    glass::copy_fractals(glass::Fractals::kind, \
                         {to, from, m_start, k_start, m_steps, k_steps, source_stride, destination_stride}, \
                         glass::type_of<T>()); \
  }
GLASS_FRACTALS(asc_copy_l12l0a, kToL0A)
GLASS_FRACTALS(asc_copy_l12l0b, kToL0B)
GLASS_FRACTALS(asc_copy_l12l0a_transpose, kToL0ATransposed)
GLASS_FRACTALS(asc_copy_l12l0b_transpose, kToL0BTransposed)
#undef GLASS_FRACTALS

void asc_copy_l12l0a_mx(uint64_t to, fp8_e8m0_t* from, int x_start, int y_start, int x_steps, int y_steps,
                        int source_stride, int destination_stride);
void asc_copy_l12l0b_mx(uint64_t to, fp8_e8m0_t* from, int x_start, int y_start, int x_steps, int y_steps,
                        int source_stride, int destination_stride);

template <class T>
void asc_fill_l1(T* to, uint32_t value, asc_fill_value_config config) {
  glass::fill_l1(to, value, sizeof(T), config);
}

template <class T>
void asc_copy_gm2ub_align(T* to, T* from, int bursts, uint32_t length, int left, int right, bool constant,
                          asc_load_l2_cache_mode, uint64_t source_stride, uint64_t destination_stride) {
  glass::copy_global_to_ub(to, from, bursts, length, left, right, constant, source_stride, destination_stride,
                           sizeof(T));
}
void asc_copy_ub2gm_align(uint8_t* to, uint8_t* from, int bursts, uint32_t length, asc_store_l2_cache_mode,
                          uint64_t destination_stride, uint64_t source_stride);
void asc_copy_ub2l1(void* to, void* from, int bursts, int length, int source_gap, int destination_gap);

// Copies to global memory after one of these add to what is there, or keep the larger or smaller.
#define GLASS_ATOMIC(suffix) \
  void asc_set_atomic_add_##suffix(); \
  void asc_set_atomic_max_##suffix(); \
  void asc_set_atomic_min_##suffix();
GLASS_ATOMIC(float)
GLASS_ATOMIC(float16)
GLASS_ATOMIC(bfloat)
GLASS_ATOMIC(int8)
GLASS_ATOMIC(int16)
GLASS_ATOMIC(int32)
#undef GLASS_ATOMIC
void asc_set_atomic_none();

template <class D, class S>
void asc_copy_l0c2gm(D* to, S* from, int columns, int rows, uint32_t destination_stride, int source_stride,
                     asc_store_l2_cache_mode, asc_unit_flag_mode, asc_quant_mode quantization, asc_relu_pre_mode relu,
                     bool, bool, bool, bool) {
  glass::copy_from_l0c(
      {to, from, columns, rows, destination_stride, source_stride, 0, 0, static_cast<uint64_t>(quantization),
       static_cast<int>(relu), glass::type_of<D>(), glass::type_of<S>(), "asc_copy_l0c2gm"},
      false);
}
template <class D, class S>
void asc_copy_l0c2ub(D* to, S* from, int columns, int rows, uint32_t destination_stride, int source_stride, int second,
                     asc_dual_dst_mode dual, asc_unit_flag_mode, asc_quant_mode quantization, asc_relu_pre_mode relu,
                     bool, bool, bool, bool) {
  glass::copy_from_l0c({to, from, columns, rows, destination_stride, source_stride, static_cast<int>(dual), second,
                        static_cast<uint64_t>(quantization), static_cast<int>(relu), glass::type_of<D>(),
                        glass::type_of<S>(), "asc_copy_l0c2ub"},
                       true);
}
