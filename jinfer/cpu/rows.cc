// The handlers of `jinfer_norm` and `jinfer_scores`: what is computed of each row by itself.
#include "rows.h"

#include <algorithm>
#include <string>

#include "buffers.h"
#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

constexpr int64_t CHUNK = 1 << 15;  // numbers that are worth another thread

const RowKernels& kernels() { return JINFER_PICK(rows); }

template <class Work>
void for_rows(ffi::ThreadPool& pool, int64_t rows, int64_t size, const Work& work) {
  const int64_t each = std::max<int64_t>(1, CHUNK / std::max<int64_t>(1, size));
  const int64_t chunks = (rows + each - 1) / each;
  parallel(pool, chunks, chunks, [&](int64_t chunk) {
    const int64_t end = std::min(rows, (chunk + 1) * each);
    for (int64_t row = chunk * each; row < end; ++row) work(row);
  });
}

// Weights and biases are [groups, size]: those of row i are number i % groups.
ffi::Error norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                ffi::ResultBuffer<ffi::F32> y, bool centered, bool weighted, bool biased, float eps,
                float offset) {
  const auto refuse = [](const char* what) {
    return ffi::Error::InvalidArgument(std::string("jinfer_norm: ") + what);
  };
  if (x.dimensions().size() != 2) return refuse("x is no matrix");
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  if (!has_shape(*y, {rows, size})) return refuse("the result has not the shape of x");
  if (args.size() != size_t(weighted) + size_t(biased)) return refuse("wrong number of vectors");
  const float* vectors[2] = {};
  int64_t groups = 1;
  for (size_t i = 0; i < args.size(); ++i) {
    auto vector = args.get<ffi::Buffer<ffi::F32>>(i);
    if (vector.has_error()) return vector.error();
    if (vector->dimensions().size() != 2 || vector->dimensions()[1] != size ||
        (i > 0 && vector->dimensions()[0] != groups))
      return refuse("weights or biases do not fit x");
    groups = vector->dimensions()[0];
    vectors[i] = vector->typed_data();
  }
  if (groups < 1) return refuse("no weights");
  const float* weight = weighted ? vectors[0] : nullptr;
  const float* bias = biased ? vectors[weighted] : nullptr;
  const RowKernels& k = kernels();
  for_rows(pool, rows, size, [&](int64_t row) {
    const int64_t at = row % groups * size;
    const Norm norm{centered, eps, offset, weight ? weight + at : nullptr,
                    bias ? bias + at : nullptr};
    k.norm(x.typed_data() + row * size, size, norm, y->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

ffi::Error scores(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y,
                  bool softmax) {
  if (x.dimensions().size() != 2 || !has_shape(*y, {x.dimensions()[0], x.dimensions()[1]}))
    return ffi::Error::InvalidArgument("jinfer_scores: x and the result are not alike matrices");
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  const auto score = softmax ? kernels().softmax : kernels().sigmoid;
  for_rows(pool, rows, size, [&](int64_t row) {
    score(x.typed_data() + row * size, size, y->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jinfer_norm, jinfer::norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("centered")
                                  .Attr<bool>("weighted")
                                  .Attr<bool>("biased")
                                  .Attr<float>("eps")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jinfer_scores, jinfer::scores,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("softmax"));
