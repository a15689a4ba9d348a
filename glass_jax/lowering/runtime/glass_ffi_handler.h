// The XLA FFI handler of the custom call glass_tilelang_call.

#ifndef GLASS_FFI_HANDLER_H_
#define GLASS_FFI_HANDLER_H_

#include "acl/acl.h"
#include "xla/ffi/api/ffi.h"

namespace glass {

// Version of the custom call's attributes that this handler understands (glass_jax.lowering.ascend.ABI).
constexpr int64_t kAbi = 1;

// Launches the kernel that `attributes` names; `arguments` are its inputs and `results` its outputs, row-major.
xla::ffi::Error LaunchCustomCall(aclrtStream stream, xla::ffi::ScratchAllocator scratch,
                                 xla::ffi::RemainingArgs arguments, xla::ffi::RemainingRets results,
                                 xla::ffi::Dictionary attributes);

// The handler's signature. `Stream` is the context that yields the aclrtStream to launch on: on an NPU,
// xla::ffi::PlatformStream<aclrtStream>.
template <typename Stream>
auto CustomCallSignature() {
  return xla::ffi::Ffi::Bind()
      .template Ctx<Stream>()
      .template Ctx<xla::ffi::ScratchAllocator>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace glass

// To register, for the platform "ascend", under the name "glass_tilelang_call".
XLA_FFI_DECLARE_HANDLER_SYMBOL(GlassTilelangCall);

#endif  // GLASS_FFI_HANDLER_H_
