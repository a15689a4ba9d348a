// The FFI handler, with the one difference that lets XLA's CPU client call it: where the stream comes from.

#include <optional>

#include "glass_ffi_handler.h"

struct StubStream {};

template <>
struct xla::ffi::CtxDecoding<StubStream> {
  using Type = aclrtStream;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return reinterpret_cast<aclrtStream>(0x5717);
  }
};

XLA_FFI_DEFINE_HANDLER_SYMBOL(GlassTilelangCallOnCpu, glass::LaunchCustomCall,
                              glass::CustomCallSignature<StubStream>());
