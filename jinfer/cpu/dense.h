// Products with matrices of plain numbers: what the handler (dense.cc) and the kernels of each
// instruction set (dense_kernels.h) agree on.
#pragma once

#include <cstdint>

#include "attention.h"
#include "gate.h"

namespace jinfer {

// [outputs, inputs] in one of the plain kinds.
struct Dense {
  const void* data;
  Kind kind;
  int64_t outputs, inputs;
};

// Rows of activations up to which weights are multiplied with as they stand. Measured with AVX-512 on
// one core: this way is a fifth faster at 24 rows, equal at 48 and slower at 64.
constexpr int64_t FEW_ROWS = 36;

struct DenseKernels {
  int few, many;  // outputs that are computed together, up to FEW_ROWS rows and beyond
  // y[m * stride + n] for outputs begin .. end - 1 and all rows m of x.
  void (*multiply)(const Dense& weight, const float* x, int64_t rows, int64_t begin, int64_t end,
                   float* y, int64_t stride);
  void (*gate)(Activation activation, int64_t count, const float* up, float* y);
};

const DenseKernels& dense_portable();
const DenseKernels& dense_avx2();
const DenseKernels& dense_avx512();

}  // namespace jinfer
