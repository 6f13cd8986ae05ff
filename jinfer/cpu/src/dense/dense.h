// Products with matrices of plain numbers: what the handler (dense.cc) and the kernels of each
// instruction set (dense_kernels.h) agree on.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace jinfer {

// [outputs, inputs] in one of the plain kinds; [inputs, outputs] where it is transposed.
struct Dense {
  const void* data;
  Kind kind;
  int64_t outputs, inputs;
  bool transposed;
  int64_t apart;  // numbers from one matrix of a stack to the next
  bool pairs;     // whether it is multiplied as `DensePairs` do
  bool tiles;     // or as `DenseTiles` do
};

// Two ways to the same bits: y[m * stride + n] for outputs begin .. end - 1 and all rows m of x.
struct DenseKernels {
  int few_outputs, many_outputs;  // that are computed together
  int many_rows;                  // from which `many` is the faster one
  // Weights as they stand, x as it stands.
  void (*few)(const Dense& weight, const float* x, int64_t rows, int64_t begin, int64_t end,
              float* y, int64_t stride);
  // A row as `many` wants it, `few_outputs` numbers at a time.
  void (*arrange)(const float* x, int64_t inputs, float* to);
  void (*many)(const Dense& weight, const float* arranged, int64_t rows, int64_t begin, int64_t end,
               float* y, int64_t stride);
  void (*gate)(Activation activation, int64_t count, const float* up, float* y);

  // Numbers of an arranged row.
  int64_t arranged(int64_t inputs) const {
    return (inputs + few_outputs - 1) / few_outputs * few_outputs;
  }
};

// Kernels that multiply bfloat16 with bfloat16: two numbers beside one another count as one, of 32
// bits, among the inputs of a weight and of a row. They have no gate of their own.
struct DensePairs {
  DenseKernels kernels;
  // Rounds a row to pairs, an even number of inputs.
  void (*round)(const float* x, int64_t inputs, float* pairs);
};

// The same in tiles, for any number of rows and of inputs.
struct DenseTiles {
  int64_t outputs;  // that are computed together
  // Of an arranged row, in units of 32 bits.
  int64_t (*arranged)(int64_t inputs);
  // Rounds row `row` of `rows`, and puts it where it belongs among them.
  void (*arrange)(const float* x, int64_t inputs, int64_t row, int64_t rows, float* all);
  // y[m * stride + n] for outputs begin .. end - 1 and `count` rows from row `first` on, which is y's first.
  void (*multiply)(const Dense& weight, const float* all, int64_t rows, int64_t first, int64_t count,
                   int64_t begin, int64_t end, float* y, int64_t stride);
};

const DenseKernels& dense_portable();
const DenseKernels& dense_avx2();
const DenseKernels& dense_avx512();
inline const DenseKernels& dense_kernels() { return JINFER_PICK(dense); }

// Null where the processor has no such instructions.
const DensePairs* dense_bf16_avx512bf16();
inline const DensePairs* dense_pairs() { return JINFER_PICK_PAIRS(dense_bf16); }
const DenseTiles* dense_bf16_amx();
inline const DenseTiles* dense_tiles() { return JINFER_PICK_TILES(dense_bf16); }

}  // namespace jinfer
