// Handler of `jinfer_lora`: low-rank terms of the rows' adapters, added to products.
#include <vector>

#include "common/handler.h"
#include "common/parallel_rows.h"
#include "lora/lora_driver.h"

namespace jinfer {
namespace {

// `args`: a y for each result, the rows' slots, scales and order, the stacks A, the stacks B
// with, after each in int8, its scales.
ffi::Error lora(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                ffi::RemainingRets rets) {
  if (x.dimensions().size() != 2) return refuse("x is no matrix");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const size_t count = rets.size();
  if (inputs == 0 || count == 0) return refuse("rows of nothing");
  std::vector<int64_t> sizes;
  std::vector<const float*> ys;
  for (size_t t = 0; t < count; ++t) {
    const auto y = args.get<ffi::Buffer<ffi::F32>>(t);
    if (y.has_error()) return y.error();
    if (y->dimensions().size() != 2 || y->dimensions()[0] != rows)
      return refuse("a product does not fit the rows");
    sizes.push_back(y->dimensions()[1]), ys.push_back(y->typed_data());
  }
  Operands operands(args, count);
  LoraInner inner;
  ffi::Error error = inner.read(operands, count, inputs, rows);
  LoraSums sums;
  if (error.success()) error = sums.read(operands, inner, sizes.data());
  if (error.success() && !operands.done()) error = refuse("wrong number of buffers");
  if (error.success()) error = bind_outputs(sums, rets, rows);
  if (error.failure() || rows == 0) return error;

  std::vector<std::vector<float>> products(count);
  for (size_t t = 0; t < count; ++t) {
    products[t].resize(rows * inner.outputs(t));
    inner.set_output(t, products[t].data());
    LoraSums::Sum& sum = sums.sums[t];
    sum.inner = products[t].data(), sum.y = ys[t], sum.in_place = sum.y == sum.result;
  }
  inner.partition(nullptr, 0, pool), sums.partition(nullptr, 0, pool);
  static thread_local std::vector<float> buffers[DenseWork::kForms];
  for (size_t form = 0; form < DenseWork::kForms; ++form) {
    const size_t size = rows * inner.row_bytes(form) / 4;
    if (buffers[form].size() < size) buffers[form].resize(size);
    inner.rows[form] = reinterpret_cast<char*>(buffers[form].data());
  }
  parallel_rows(pool, rows, inputs,
                [&](int64_t row) { inner.prepare(x.typed_data() + row * inputs, row); });
  for (const MatmulWork* work : {static_cast<MatmulWork*>(&inner), static_cast<MatmulWork*>(&sums)})
    parallel_for(pool, work->chunks, work->threads, [=](int64_t chunk) { work->run(chunk); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_lora, jinfer::lora);
