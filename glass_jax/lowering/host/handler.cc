// The FFI handler of implementation="host": launches a kernel's library on XLA's buffers.

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "glass_host.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace {

using LaunchFunction = int (*)(const GlassHostLaunch*);

// The launch function of a library, null with a message if there is none. Libraries stay as long as the process.
LaunchFunction Load(const std::string& path, std::string* message) {
  static std::mutex mutex;
  static std::map<std::string, LaunchFunction> loaded;
  std::lock_guard<std::mutex> lock(mutex);
  LaunchFunction& known = loaded[path];
  if (known == nullptr) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) known = reinterpret_cast<LaunchFunction>(dlsym(library, "glass_host_launch"));
    if (known == nullptr) *message = dlerror();
  }
  return known;
}

void Append(void* context, const char* finding) {
  auto* messages = static_cast<std::string*>(context);
  *messages += *messages == "" ? finding : std::string("\n") + finding;
}

ffi::Error Call(ffi::RemainingArgs operands, ffi::RemainingRets results, std::string_view library,
                std::string_view kernel, ffi::Span<const int64_t> order, ffi::Span<const int64_t> updates,
                int64_t block_dim, int64_t dynamic_ub_bytes) {
  std::string message;
  const LaunchFunction launch_kernel = Load(std::string(library), &message);
  if (launch_kernel == nullptr) {
    return ffi::Error::Internal("kernel " + std::string(kernel) + " cannot be loaded: " + message +
                                " (was the kernel cache removed while the process ran?)");
  }
  std::vector<GlassHostBuffer> buffers;
  for (size_t i = 0; i < operands.size(); ++i) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = operands.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    buffers.push_back({"operand", buffer->untyped_data(), buffer->size_bytes(), 0});
  }
  for (size_t i = 0; i < results.size(); ++i) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    GlassHostBuffer result{"result", (*buffer)->untyped_data(), (*buffer)->size_bytes(), 1};
    if (updates[i] < 0) {
      std::memset(result.data, 0xff, result.bytes);  // NaN in every type of floats: what nobody writes shows
    } else {
      std::memcpy(result.data, buffers[updates[i]].data, result.bytes);
      result.result = 0;
    }
    buffers.push_back(result);
  }
  std::vector<GlassHostBuffer> parameters;
  for (const int64_t position : order) parameters.push_back(buffers[position]);

  GlassHostLaunch launch{};
  launch.abi = GLASS_HOST_ABI;
  launch.buffers = parameters.data();
  launch.num_buffers = parameters.size();
  launch.block_dim = block_dim;
  launch.dynamic_ub_bytes = dynamic_ub_bytes;
  launch.threads = std::thread::hardware_concurrency();
  launch.report = Append;
  launch.context = &message;
  if (launch_kernel(&launch) == 0) return ffi::Error::Success();
  return ffi::Error::Internal("kernel " + std::string(kernel) + " did not run to its end: " + message);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(GlassHostCall, Call,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("library")
                                  .Attr<std::string_view>("kernel")
                                  .Attr<ffi::Span<const int64_t>>("order")
                                  .Attr<ffi::Span<const int64_t>>("updates")
                                  .Attr<int64_t>("block_dim")
                                  .Attr<int64_t>("dynamic_ub_bytes"));
