// Handler of `jinfer_linear`: matmul with quantized matrices, or with some matrices of stacks.
#include <algorithm>
#include <memory>
#include <vector>

#include "common/handler.h"
#include "linear/linear_driver.h"

namespace jinfer {
namespace {

// Rows of activations in a layout.
struct ActivationBuffer {
  std::vector<char> memory;

  char* prepare(ffi::ThreadPool& pool, const ActivationLayout& layout, const float* x, int64_t rows,
                int64_t inputs) {
    const size_t bytes = rows * layout.row_bytes() + 64;
    if (memory.size() < bytes) memory.resize(bytes);
    char* data = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
    const LinearKernels& k = linear_kernels();
    const int64_t chunks = rows >= 16 ? std::min<int64_t>(rows / 8, 16) : 1;
    parallel_for(pool, chunks, chunks, [&](int64_t chunk) {
      for (int64_t m = rows * chunk / chunks; m < rows * (chunk + 1) / chunks; ++m)
        k.prepare(x + m * inputs, inputs, layout, data + m * layout.row_bytes());
    });
    return data;
  }
};

ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Span<const int64_t> fields,
                  ffi::Span<const int64_t> codebook, int64_t digits, int64_t activation,
                  int64_t select) {
  if (x.dimensions().size() != 2) return refuse("x is no matrix");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  size_t next = 0;
  const auto segments = read_segments(args, select, rows, next);
  if (segments.has_error()) return segments.error();
  Operands operands(args, next);
  LinearWork product;
  auto error = product.read(operands, fields.begin(), fields.size() / kFields, codebook.begin(),
                            codebook.size(), inputs, digits, activation,
                            rows / std::max<int64_t>(segments->size(), 1));
  if (error.failure()) return error;
  for (const Tensor& tensor : product.tensors)
    for (const Segment& segment : *segments)
      if (segment.index < 0 || segment.index >= tensor.count)
        return refuse("no such matrix in the stack");
  error = bind_outputs(product, rets, rows);
  if (error.failure()) return error;
  if (!operands.done()) return refuse("wrong number of buffers");
  if (rows == 0) return ffi::Error::Success();

  // Quantizes activations once for all tensors that share a layout.
  static thread_local std::vector<ActivationBuffer> buffers;
  if (buffers.size() < product.layouts.size()) buffers.resize(product.layouts.size());
  for (size_t f = 0; f < product.layouts.size(); ++f)
    product.rows[f] = buffers[f].prepare(pool, product.layouts[f], x.typed_data(), rows, inputs);
  product.partition(segments->data(), segments->size(), pool);
  parallel_for(pool, product.chunks, product.threads, [&](int64_t chunk) { product.run(chunk); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_linear, jinfer::linear, "tensors", "codebook", "digits", "activation",
               "select");
