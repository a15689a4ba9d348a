// Everything that a generated kernel is compiled against: the runtime, then TileLang's own templates, unchanged.
#pragma once

#include "device.h"
#include "copies.h"
#include "cube.h"
#include "entry.h"
#include "simd.h"
#include "simd_merging.h"
#include "simt.h"
#include "sync.h"

namespace glass {

template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

template <auto Region>
struct Deferred;
template <class... Parameters, void (*Region)(Parameters...)>
struct Deferred<Region> {
  template <size_t... I>
  static void run(const uint64_t* words, std::index_sequence<I...>) {
    Region(from_word<Parameters>(words[I])...);
  }
  static void record(const char* name, Parameters... arguments) {
    const uint64_t words[] = {to_word(arguments)..., 0};
    record_region(
        name, [](const uint64_t* w) { run(w, std::index_sequence_for<Parameters...>()); }, words,
        sizeof...(Parameters));
  }
};

}  // namespace glass

#include "tl_templates/ascend/common.h"
#include "tl_templates/ascend/debug.h"
#include "tl_templates/ascend/dcache_bypass.h"
#include "tl_templates/ascend/gemm.h"
#include "tl_templates/ascend/nd2nz_copy.h"
#include "tl_templates/ascend/philox_rng.h"
#include "tl_templates/ascend/simd_inst.h"
