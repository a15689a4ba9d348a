#include "glass_ffi_handler.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "glass_launch.h"

namespace glass {
namespace {

namespace ffi = ::xla::ffi;

// Device addresses of the operands, then of the results.
ffi::Error CollectBuffers(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results,
                          std::vector<void*>* buffers) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = arguments.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers->push_back(buffer->untyped_data());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers->push_back((*buffer)->untyped_data());
  }
  return ffi::Error::Success();
}

// Reads attributes one by one and remembers the first failure.
class AttributeReader {
 public:
  explicit AttributeReader(const ffi::Dictionary& attributes) : attributes_(attributes) {}

  template <typename T>
  T Get(std::string_view name) {
    ffi::ErrorOr<T> value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    if (error_.success()) {
      error_ = ffi::Error::InvalidArgument("glass_tilelang_call has no valid attribute " + std::string(name) + ": " +
                                           value.error().message());
    }
    return T{};
  }

  const ffi::Error& error() const { return error_; }

 private:
  const ffi::Dictionary& attributes_;
  ffi::Error error_ = ffi::Error::Success();
};

}  // namespace

ffi::Error LaunchCustomCall(aclrtStream stream, ffi::ScratchAllocator scratch, ffi::RemainingArgs arguments,
                            ffi::RemainingRets results, ffi::Dictionary attributes) {
  AttributeReader reader(attributes);
  const int64_t abi = reader.Get<int64_t>("abi");
  if (reader.error().success() && abi != kAbi) {
    return ffi::Error::InvalidArgument("glass_tilelang_call: the module was exported with abi " + std::to_string(abi) +
                                       ", this handler understands " + std::to_string(kAbi) +
                                       ": build the handler from the sources in the module's own bundle");
  }
  KernelLaunch launch;
  launch.kernel = reader.Get<std::string_view>("kernel");
  launch.entry = reader.Get<std::string_view>("entry");
  launch.arch = reader.Get<std::string_view>("arch");
  launch.block_dim = reader.Get<int64_t>("block_dim");
  launch.dynamic_ub_bytes = reader.Get<int64_t>("dynamic_ub_bytes");
  const int64_t workspace_bytes = reader.Get<int64_t>("workspace_bytes");
  const ffi::Span<const int64_t> order = reader.Get<ffi::Span<const int64_t>>("launch_order");
  launch.order.assign(order.begin(), order.end());
  if (reader.error().failure()) return reader.error();

  std::vector<void*> buffers;
  if (ffi::Error error = CollectBuffers(arguments, results, &buffers); error.failure()) return error;
  if (workspace_bytes > 0) {
    // XLA frees scratch memory when the handler returns, in the order of the stream: after the kernel enqueued below.
    std::optional<void*> workspace = scratch.Allocate(workspace_bytes, /*alignment=*/512);
    if (!workspace.has_value()) {
      return ffi::Error::Internal("glass_tilelang_call: no device memory for the workspace of kernel " + launch.entry +
                                  ", " + std::to_string(workspace_bytes) + " bytes");
    }
    buffers.push_back(*workspace);
  }
  if (std::string message = Launch(launch, buffers, stream); !message.empty()) {
    return ffi::Error::Internal("glass_tilelang_call: " + message);
  }
  return ffi::Error::Success();
}

}  // namespace glass

XLA_FFI_DEFINE_HANDLER_SYMBOL(GlassTilelangCall, glass::LaunchCustomCall,
                              glass::CustomCallSignature<xla::ffi::PlatformStream<aclrtStream>>());
