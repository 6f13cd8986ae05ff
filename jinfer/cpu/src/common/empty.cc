// The handler of `jinfer_empty`: a buffer as the allocator gives it. The system gives pages out
// when they are touched, so that a large pool takes memory as it is used.
#include <cstdint>

#include "common/handler.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

ffi::Error empty(ffi::Result<ffi::AnyBuffer>, std::int32_t) { return ffi::Error::Success(); }

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_empty, jinfer::empty, "which");
