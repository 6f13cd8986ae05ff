// Matmul with float32, bfloat16, float16, int8 and scaled E4M3 matrices: the interface between
// driver and kernels.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace jinfer {

// [outputs, inputs] of a plain dtype; [inputs, outputs] if transposed.
struct DenseMatrix {
  const void* data;
  DType dtype;
  int64_t outputs, inputs;
  bool transposed;
  int64_t stack_stride;  // numbers from one matrix of a stack to the next
  bool tiles;            // multiply with `DenseBf16Tiles`
  // Of E4M3: [outputs, blocks] factors, of 2^block_log2 inputs each; row_blocks: blocks of a row.
  const float* scales = nullptr;
  int64_t row_blocks = 0;
  int block_log2 = 0;
};

// Two kernels with the same bits: y[m * stride + n] for outputs begin .. end - 1 and all rows m of
// x.
struct DenseKernels {
  int gemv_outputs, gemm_outputs;  // computed together
  int gemm_min_rows;               // from which `gemm` is faster
  // Weights and x as stored.
  void (*gemv)(const DenseMatrix& weight, const float* x, int64_t rows, int64_t begin, int64_t end,
               float* y, int64_t stride);
  // Packs a row for `gemm`.
  void (*pack)(const float* x, int64_t inputs, float* to);
  void (*gemm)(const DenseMatrix& weight, const float* packed, int64_t rows, int64_t begin,
               int64_t end, float* y, int64_t stride);
  void (*glu)(Activation activation, int64_t count, const float* up, float* y);

  // Numbers of a packed row.
  int64_t packed(int64_t inputs) const {
    return (inputs + gemv_outputs - 1) / gemv_outputs * gemv_outputs;
  }
};

// Dot products of bfloat16, for any number of rows and inputs: AVX-512 BF16 or AMX tiles, with the
// same bits. These kernels have no GLU.
struct DenseBf16Tiles {
  int64_t outputs;   // computed together
  bool splits_rows;  // whether some of many rows take their share of the time
  // Size of a packed row in units of 32 bits: pairs of numbers.
  int64_t (*packed)(int64_t inputs);
  // Rounds row `row` of `rows` and packs it into `all`.
  void (*pack)(const float* x, int64_t inputs, int64_t row, int64_t rows, float* all);
  // y[m * stride + n] for outputs begin .. end - 1 and `count` rows from row `first` on; y begins
  // at row `first`.
  void (*multiply)(const DenseMatrix& weight, const float* all, int64_t rows, int64_t first,
                   int64_t count, int64_t begin, int64_t end, float* y, int64_t stride);
};

const DenseKernels& dense_portable();
const DenseKernels& dense_avx2();
const DenseKernels& dense_avx512();
inline const DenseKernels& dense_kernels() { return JINFER_DISPATCH(dense); }

const DenseBf16Tiles* dense_bf16_avx512bf16();
const DenseBf16Tiles* dense_bf16_amx();
// Null if the processor lacks these instructions.
inline const DenseBf16Tiles* dense_bf16_tiles() { return JINFER_DISPATCH_TILES(dense_bf16); }

}  // namespace jinfer
