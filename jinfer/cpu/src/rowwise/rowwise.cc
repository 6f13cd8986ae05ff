// Handlers of row-wise operations: `jinfer_norm`, `jinfer_rotate`, `jinfer_hadamard`,
// `jinfer_softmax`, `jinfer_activate`, `jinfer_argmax`.
#include "rowwise/rowwise.h"

#include <algorithm>
#include <string>

#include "common/buffer_checks.h"
#include "common/handler.h"
#include "common/parallel_rows.h"
#include "rowwise/argmax.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

// Weights and biases are [groups, size]; row i uses group i % groups.
ffi::Error norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                ffi::ResultBuffer<ffi::F32> y, bool centered, bool weighted, bool biased, float eps,
                float offset) {
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
  const RowwiseKernels& k = rowwise_kernels();
  parallel_rows(pool, rows, size, [&](int64_t row) {
    const int64_t at = row % groups * size;
    const Norm norm{centered, eps, offset, weight ? weight + at : nullptr,
                    bias ? bias + at : nullptr};
    k.norm(x.typed_data() + row * size, size, norm, y->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

ffi::Error rotate(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> cos,
                  ffi::Buffer<ffi::F32> sin, ffi::ResultBuffer<ffi::F32> y, int64_t size,
                  bool adjacent) {
  if (x.dimensions().size() != 2 || cos.dimensions().size() != 2) return refuse("no matrices");
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1], pairs = cos.dimensions()[1];
  if (size < 1 || width % size || 2 * pairs > size)
    return refuse("heads of such a size do not fit");
  if (!has_shape(cos, {rows, pairs}) || !has_shape(sin, {rows, pairs}) ||
      !has_shape(*y, {rows, width}))
    return refuse("angles or the result do not fit x");
  const Rotation rotation{size, pairs, adjacent};
  parallel_rows(pool, rows, width, [&](int64_t row) {
    rowwise_kernels().rotate(x.typed_data() + row * width, cos.typed_data() + row * pairs,
                             sin.typed_data() + row * pairs, width, rotation,
                             y->typed_data() + row * width);
  });
  return ffi::Error::Success();
}

// Calls f(row of x, size, row of y) for each row of x and y, which are alike.
template <class F>
ffi::Error map_rows(ffi::ThreadPool& pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y,
                    F f) {
  if (x.dimensions().size() != 2 || !has_shape(*y, {x.dimensions()[0], x.dimensions()[1]}))
    return refuse("x and the result are not alike matrices");
  const int64_t size = x.dimensions()[1];
  parallel_rows(pool, x.dimensions()[0], size, [&](int64_t row) {
    f(x.typed_data() + row * size, size, y->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

ffi::Error hadamard(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y,
                    int64_t size, bool query) {
  if (size < 1 || x.dimensions().size() != 2 || x.dimensions()[1] % size)
    return refuse("heads of such a size do not fit");
  return map_rows(pool, x, y, [=](const float* from, int64_t width, float* to) {
    rowwise_kernels().hadamard(from, width, {size, query}, to);
  });
}

ffi::Error softmax(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  return map_rows(pool, x, y, rowwise_kernels().softmax);
}

ffi::Error activate(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y,
                    int64_t activation) {
  if (!is_activation(activation)) return refuse("no such activation");
  return map_rows(pool, x, y, [=](const float* from, int64_t size, float* to) {
    rowwise_kernels().activate(from, static_cast<Activation>(activation), size, to);
  });
}

ffi::Error argmax(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S32> y) {
  if (x.dimensions().size() != 2 || !has_shape(*y, {x.dimensions()[0]}))
    return refuse("the result is not a number for each row");
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  if (size < 1 || size > INT32_MAX) return refuse("rows are empty or too long");
  argmax_rows(pool, x.typed_data(), rows, size, y->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_norm, jinfer::norm, "centered", "weighted", "biased", "eps", "offset");
JINFER_HANDLER(jinfer_rotate, jinfer::rotate, "size", "adjacent");
JINFER_HANDLER(jinfer_hadamard, jinfer::hadamard, "size", "query");
JINFER_HANDLER(jinfer_softmax, jinfer::softmax);
JINFER_HANDLER(jinfer_activate, jinfer::activate, "activation");
JINFER_HANDLER(jinfer_argmax, jinfer::argmax);
