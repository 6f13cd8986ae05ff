// Root mean square norm of rows: four small loops of XLA's as one call.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;            // sums side by side, which a compiler keeps in vectors
constexpr int64_t kChunk = 1 << 15;   // numbers that are worth another thread

void norm_row(const float* x, const float* weight, float offset, float eps, int64_t size, float* y) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  float sum = 0;
  for (; i < size; ++i) sum += x[i] * x[i];
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (i = 0; i < size; ++i) y[i] = x[i] * scale * (weight[i] + offset);
}

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                    ffi::ResultBuffer<ffi::F32> y, float eps, float offset) {
  const int64_t size = weight.element_count();
  const int64_t rows = size == 0 ? 0 : x.element_count() / size;
  const float* in = x.typed_data();
  const float* factors = weight.typed_data();
  float* out = y->typed_data();
  const int64_t each = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, size));
  const int64_t chunks = (rows + each - 1) / each;
  jinfer::parallel(pool, chunks, pool.num_threads(), [&](int64_t chunk) {
    const int64_t end = std::min(rows, (chunk + 1) * each);
    for (int64_t row = chunk * each; row < end; ++row)
      norm_row(in + row * size, factors, offset, eps, size, out + row * size);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jinfer_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));
