// Products with matrices of plain numbers: what the handler (dense.cc) and the kernels of each
// instruction set (dense_kernels.h) agree on.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace jinfer {

// [outputs, inputs] in one of the plain kinds; [inputs, outputs] where it is transposed.
struct DenseMatrix {
  const void* data;
  DType dtype;
  int64_t outputs, inputs;
  bool transposed;
  int64_t stack_stride;  // numbers from one matrix of a stack to the next
  bool pairs;     // whether it is multiplied as `DenseBf16Pairs` do
  bool tiles;     // or as `DenseBf16Tiles` do
};

// Two ways to the same bits: y[m * stride + n] for outputs begin .. end - 1 and all rows m of x.
struct DenseKernels {
  int gemv_outputs, gemm_outputs;  // that are computed together
  int gemm_min_rows;                  // from which `many` is the faster one
  // Weights as they stand, x as it stands.
  void (*gemv)(const DenseMatrix& weight, const float* x, int64_t rows, int64_t begin, int64_t end,
              float* y, int64_t stride);
  // A row as `many` wants it, `gemv_outputs` numbers at a time.
  void (*pack)(const float* x, int64_t inputs, float* to);
  void (*gemm)(const DenseMatrix& weight, const float* packed, int64_t rows, int64_t begin, int64_t end,
               float* y, int64_t stride);
  void (*glu)(Activation activation, int64_t count, const float* up, float* y);

  // Numbers of an packed row.
  int64_t packed(int64_t inputs) const {
    return (inputs + gemv_outputs - 1) / gemv_outputs * gemv_outputs;
  }
};

// Kernels that multiply bfloat16 with bfloat16: two numbers beside one another count as one, of 32
// bits, among the inputs of a weight and of a row. They have no gate of their own.
struct DenseBf16Pairs {
  DenseKernels kernels;
  // Rounds a row to pairs, an even number of inputs.
  void (*round)(const float* x, int64_t inputs, float* pairs);
};

// The same in tiles, for any number of rows and of inputs.
struct DenseBf16Tiles {
  int64_t outputs;  // that are computed together
  // Of an packed row, in units of 32 bits.
  int64_t (*packed)(int64_t inputs);
  // Rounds row `row` of `rows`, and puts it where it belongs among them.
  void (*pack)(const float* x, int64_t inputs, int64_t row, int64_t rows, float* all);
  // y[m * stride + n] for outputs begin .. end - 1 and `count` rows from row `first` on, which is y's first.
  void (*multiply)(const DenseMatrix& weight, const float* all, int64_t rows, int64_t first, int64_t count,
                   int64_t begin, int64_t end, float* y, int64_t stride);
};

const DenseKernels& dense_portable();
const DenseKernels& dense_avx2();
const DenseKernels& dense_avx512();
inline const DenseKernels& dense_kernels() { return JINFER_DISPATCH(dense); }

// Null where the processor has no such instructions.
const DenseBf16Pairs* dense_bf16_avx512bf16();
inline const DenseBf16Pairs* dense_bf16_pairs() { return JINFER_DISPATCH_PAIRS(dense_bf16); }
const DenseBf16Tiles* dense_bf16_amx();
inline const DenseBf16Tiles* dense_bf16_tiles() { return JINFER_DISPATCH_TILES(dense_bf16); }

}  // namespace jinfer
