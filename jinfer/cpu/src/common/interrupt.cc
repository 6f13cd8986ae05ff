// Interrupt flags: the host raises one, and `jinfer_interrupted` lets a running program's loop poll
// it.
#include <atomic>
#include <cstdint>

#include "common/buffer_checks.h"
#include "common/handler.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

constexpr int32_t kFlags = 1024;
std::atomic<bool> raised[kFlags];

bool is_flag(int32_t flag) { return flag >= 0 && flag < kFlags; }

ffi::Error interrupted(ffi::Buffer<ffi::S32> flag, ffi::Buffer<ffi::S32>,
                       ffi::Result<ffi::Buffer<ffi::PRED>> out) {
  const int32_t which = flag.typed_data()[0];
  if (!is_flag(which)) return refuse("there is no such flag");
  out->typed_data()[0] = raised[which].load(std::memory_order_relaxed);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

// The second argument, the loop's step, is not read; it keeps the call from being hoisted out of
// the loop.
JINFER_HANDLER(jinfer_interrupted, jinfer::interrupted);

// Returns whether there is such a flag.
extern "C" __attribute__((visibility("default"))) bool jinfer_set_interrupt(int32_t flag, bool on) {
  if (!jinfer::is_flag(flag)) return false;
  jinfer::raised[flag].store(on, std::memory_order_relaxed);
  return true;
}
