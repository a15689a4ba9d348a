// Threads of a SIMT region, and what they and scalar programs do to memory.
#pragma once

#include <tuple>

#include "device.h"
#include "entry.h"

extern __thread uint3 threadIdx __attribute__((tls_model("initial-exec")));
extern __thread uint3 blockIdx __attribute__((tls_model("initial-exec")));

namespace glass {

// Checks an access and tells where it goes: to the address itself, or, out of bounds, to bytes of nobody.
void* element(const void* at, size_t size, Access access);

// An element of UB or of global memory, read and written through the checks.
template <class T>
class Element {
 public:
  explicit Element(T* at) : at_(at) {}
  operator T() const { return *static_cast<T*>(element(at_, sizeof(T), Access::kRead)); }
  Element& operator=(T value) {
    *static_cast<T*>(element(at_, sizeof(T), Access::kWrite)) = value;
    return *this;
  }
  Element& operator=(const Element& other) { return *this = static_cast<T>(other); }
  template <class U>
  Element& operator+=(U value) {
    return *this = static_cast<T>(T(*this) + value);
  }
  template <class U>
  Element& operator-=(U value) {
    return *this = static_cast<T>(T(*this) - value);
  }
  template <class U>
  Element& operator*=(U value) {
    return *this = static_cast<T>(T(*this) * value);
  }
  T* operator&() const { return at_; }

 private:
  T* at_;
};

template <class T>
class Elements {
 public:
  explicit Elements(T* at) : at_(at) {}
  template <class I>
  Element<T> operator[](I index) const {
    return Element<T>(at_ + index);
  }
  Element<T> operator*() const { return Element<T>(at_); }

 private:
  T* at_;
};

// What adapt.py puts around a pointer that generated code dereferences.
template <class T>
Elements<T> elements(T* pointer) {
  return Elements<T>(pointer);
}
template <class T, class P>
Elements<T> elements_of(P* pointer) {
  return Elements<T>(reinterpret_cast<T*>(pointer));
}

// Records the region; runs it, when its turn comes, once for each thread.
void record_threads(const char* name, unsigned x, unsigned y, unsigned z, void (*run)(const void* arguments),
                    const void* arguments, size_t size);

// What a warp of 32 threads does together. Bits of a value as a word; lanes that do not take part are left out.
enum class Warp : uint8_t { kShuffleXor, kAdd, kMax, kMin, kBallot, kActive, kSync };
uint64_t warp(Warp op, uint64_t value, int argument, Type type);
template <class T>
T warp_value(Warp op, T value, int argument = 0) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = warp(op, word, argument, type_of<T>());
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

enum class Atomic : uint8_t { kAdd, kMax, kMin };
uint64_t atomic(Atomic op, void* at, uint64_t value, Type type);
template <class T>
T atomic_value(Atomic op, T* at, T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = atomic(op, at, word, type_of<T>());
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace glass

template <auto Region, class... Arguments>
void asc_vf_call(cce::dim3 threads, Arguments... arguments) {
  using Tuple = std::tuple<Arguments...>;
  const Tuple all(arguments...);
  glass::record_threads(
      "the SIMT region", threads.x, threads.y, threads.z,
      [](const void* a) { std::apply(Region, *static_cast<const Tuple*>(a)); }, &all, sizeof all);
}

void asc_syncthreads();
inline void asc_threadfence() {}  // threads of a region run in an order that keeps their own
#define GLASS_WARP(T) \
  inline T asc_shfl_xor(T value, int lane_mask) { \
    return glass::warp_value(glass::Warp::kShuffleXor, value, lane_mask); \
  } \
  inline T asc_reduce_add(T value) { return glass::warp_value(glass::Warp::kAdd, value); } \
  inline T asc_reduce_max(T value) { return glass::warp_value(glass::Warp::kMax, value); } \
  inline T asc_reduce_min(T value) { return glass::warp_value(glass::Warp::kMin, value); }
GLASS_WARP(float)
GLASS_WARP(half)
GLASS_WARP(int32_t)
GLASS_WARP(uint32_t)
GLASS_WARP(int64_t)
GLASS_WARP(uint64_t)
#undef GLASS_WARP
inline uint32_t asc_ballot(bool predicate) {
  return static_cast<uint32_t>(glass::warp(glass::Warp::kBallot, predicate, 0, glass::Type::kU32));
}
inline uint32_t asc_activemask() {
  return static_cast<uint32_t>(glass::warp(glass::Warp::kActive, 1, 0, glass::Type::kU32));
}
uint32_t laneid();

namespace cooperative_groups {
struct coalesced_group {
  void sync() const { glass::warp(glass::Warp::kSync, 0, 0, glass::Type::kU32); }
};
inline coalesced_group coalesced_threads() { return {}; }
}  // namespace cooperative_groups

// Atomic updates of UB or global memory; the old value comes back.
template <class T>
T asc_atomic_add(T* at, std::type_identity_t<T> value) {
  return glass::atomic_value(glass::Atomic::kAdd, at, value);
}
template <class T>
T asc_atomic_max(T* at, std::type_identity_t<T> value) {
  return glass::atomic_value(glass::Atomic::kMax, at, value);
}
template <class T>
T asc_atomic_min(T* at, std::type_identity_t<T> value) {
  return glass::atomic_value(glass::Atomic::kMin, at, value);
}

// Scalar accesses of global memory past the cache.
template <class T>
T asc_load_dev(T* at) {
  return *glass::elements(at);
}
template <class T>
void asc_store_dev(T* at, T value) {
  *glass::elements(at) = value;
}
