// Handler of `jinfer_copy_blocks`: copies blocks of the KV cache in place.
#include <cstdint>
#include <cstring>

#include "common/buffer_checks.h"
#include "common/handler.h"
#include "common/parallel.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

ffi::Error copy_blocks(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> sources,
                       ffi::Buffer<ffi::S32> targets, ffi::Buffer<ffi::S32> count,
                       ffi::RemainingArgs arrays, ffi::RemainingRets out) {
  const int64_t capacity = sources.element_count();
  const int64_t copies = count.element_count() == 1 ? count.typed_data()[0] : -1;
  if (!has_shape(targets, {capacity}) || copies < 0 || copies > capacity ||
      arrays.size() != out.size()) {
    return refuse("copies do not fit each other");
  }
  for (int64_t i = 0; i < copies; ++i) {
    for (size_t a = 0; a < arrays.size(); ++a) {
      auto array = arrays.get<ffi::AnyBuffer>(a);
      auto result = out.get<ffi::AnyBuffer>(a);
      if (!array.has_value() || !result.has_value() || array->dimensions().size() < 1 ||
          array->untyped_data() != (*result)->untyped_data()) {
        return refuse("an array is not changed in place");
      }
      const int64_t blocks = array->dimensions()[0];
      const int64_t source = sources.typed_data()[i], target = targets.typed_data()[i];
      if (source < 0 || source >= blocks || target < 0 || target >= blocks) {
        return refuse("there is no such block");
      }
    }
  }
  if (copies == 0) return ffi::Error::Success();
  // A copy's source may be another copy's target: those of one array run in order.
  parallel_for(pool, static_cast<int64_t>(arrays.size()), pool.num_threads(), [&](int64_t a) {
    auto array = *arrays.get<ffi::AnyBuffer>(a);
    const int64_t bytes = static_cast<int64_t>(array.size_bytes()) / array.dimensions()[0];
    char* data = static_cast<char*>(array.untyped_data());
    for (int64_t i = 0; i < copies; ++i) {
      const int64_t source = sources.typed_data()[i], target = targets.typed_data()[i];
      const char* from = data + source * bytes;
      char* to = data + target * bytes;
      // Memory that was never written, such as a short text's int8 keys, is zeros: the system
      // commits it when it is written.
      if (std::memcmp(from, to, bytes)) std::memcpy(to, from, bytes);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_copy_blocks, jinfer::copy_blocks);
