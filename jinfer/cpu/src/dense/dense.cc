// Handler of `jinfer_dense`: matmul with plain matrices, or with some matrices of stacks.
#include <algorithm>
#include <vector>

#include "common/handler.h"
#include "dense/dense_driver.h"

namespace jinfer {
namespace {

constexpr int64_t ROWS = 32;  // rows whose packing is worth a thread

ffi::Error dense(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, int64_t activation, int64_t select, bool transposed,
                 int64_t first, int64_t taken, bool rounded) {
  if (x.dimensions().size() != 2) return refuse("x is no matrix");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  size_t next = 0;
  const auto segments = read_segments(args, select, rows, next);
  if (segments.has_error()) return segments.error();
  DenseWork product;
  const size_t count = activation != 0 ? 2 : rets.size();
  Operands operands(args, next);
  auto error = product.read(operands, count, inputs,
                            {activation, select != kSingle, transposed, first, taken, rounded});
  if (error.failure()) return error;
  if (!operands.done()) return refuse("more weights than results");
  for (const Segment& segment : *segments)
    if (segment.index < 0 || segment.index >= product.count())
      return refuse("no such matrix in the stack");
  error = bind_outputs(product, rets, rows);
  if (error.failure()) return error;
  for (size_t t = 0; inputs == 0 && t < rets.size(); ++t) {
    auto y = **rets.get<ffi::Buffer<ffi::F32>>(t);
    std::fill_n(y.typed_data(), y.element_count(), 0.0f);
  }
  if (rows == 0 || inputs == 0) return ffi::Error::Success();

  product.partition(segments->data(), segments->size(), pool);
  product.rows[DenseWork::kPlain] = static_cast<char*>(x.untyped_data());
  static thread_local std::vector<float> buffers[DenseWork::kForms];
  bool any = false;
  for (size_t form = DenseWork::kPlain + 1; form < DenseWork::kForms; ++form) {
    const size_t size = rows * product.row_bytes(form) / 4;
    if (buffers[form].size() < size) buffers[form].resize(size);
    product.rows[form] = reinterpret_cast<char*>(buffers[form].data());
    any |= size > 0;
  }
  if (any) {
    const int64_t shares = std::min<int64_t>(rows / ROWS + 1, 4 * product.threads);
    parallel_for(pool, shares, product.threads, [&](int64_t share) {
      for (int64_t m = rows * share / shares; m < rows * (share + 1) / shares; ++m)
        product.prepare(x.typed_data() + m * inputs, m);
    });
  }
  parallel_for(pool, product.chunks, product.threads, [&](int64_t chunk) { product.run(chunk); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_dense, jinfer::dense, "activation", "select", "transposed", "first", "taken",
               "rounded");
