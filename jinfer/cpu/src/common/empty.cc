// Handler of `jinfer_empty`: an uninitialised buffer. The system backs pages when they are first
// touched, so a large pool takes memory as it is used.
#include <cstdint>

#include "common/handler.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

ffi::Error empty(ffi::Result<ffi::AnyBuffer>, std::int32_t) { return ffi::Error::Success(); }

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_empty, jinfer::empty, "which");
