// What is computed of each row by itself: norms, softmax and sigmoid. A row's bits depend on nothing
// but the row, which is not so of XLA's sums over the last axis.
#pragma once

#include <cstdint>

namespace jinfer {

struct Norm {
  bool centered;        // a layer norm, else a root mean square norm
  float eps, offset;    // of the weights
  const float* weight;  // [size], or null: 1
  const float* bias;    // [size], or null: 0
};

struct RowKernels {
  // y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + offset) + bias, mean = 0 if not
  // centered.
  void (*norm)(const float* x, int64_t size, const Norm& norm, float* y);
  void (*softmax)(const float* x, int64_t size, float* y);
  void (*sigmoid)(const float* x, int64_t size, float* y);
};

const RowKernels& rows_portable();
const RowKernels& rows_avx2();
const RowKernels& rows_avx512();

}  // namespace jinfer
