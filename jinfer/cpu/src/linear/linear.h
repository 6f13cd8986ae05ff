// Products with quantized matrices: what the handler (linear.cc) and the kernels of each
// instruction set (linear_kernels.h) agree on. QuantizedTensor's docstring defines the layout of
// matrices; the names here are the same: tiles of R rows, superblocks of G columns, a column is 32
// codes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/activation.h"
#include "common/code_widths.h"
#include "common/isa.h"

namespace jinfer {

struct Matrix {
  const uint32_t* words;
  const void* scales;       // float16, or int8 where there are steps
  const uint16_t* steps;    // float16, or null
  const uint8_t* codebook;  // 16 values + 128, or null
  int bits;                 // of a code
  int per_code;               // weights in a code: 1, or 2 where it is 11 x + y
  int block;
  int numbers;  // of a block: 1 scale, 2 scale and base
  int zero;     // code of 0 where there is no base
  int R, G;
  int64_t tiles, superblocks, outputs, inputs;

  bool affine() const { return numbers == 2; }
  int64_t columns() const { return superblocks * per_code * G; }
  // Weights of a row in a superblock, and superblocks that share the numbers of a block.
  int width() const { return 32 * G * per_code; }
  int shared() const { return std::max(1, block / width()); }
};

// What rows of activations must look like for a matrix. Columns stand in groups of G, one record for
// each group, which holds
//
//   int8 codes[8][G][4]      4-byte word s of each column side by side, so that one load, repeated
//                            over the vector if G < L, is what a vector of codes is multiplied with
//   float scales[G]          a code's value
//   int32 sums[parts][G]     -zero * sum of codes where the matrix is symmetric, else as float32
//                            the sum of the values
//
// In tiles a row has the same numbers one kind after the other: int8 codes[columns][32], float
// scales[columns], int32 sums[parts][columns].
//
// For codes of 16 bits a record holds whole numbers of 14, one digit that does for all:
//
//   int16 codes[16][G][2]    word s of each column side by side
//   float scales[G]
//
// A row may have several digits, the first of which counts most: each is a row of its own to the
// kernels, whose scales are kBase (linear_kernels.h) times those of the next one, and their products
// are added up.
struct ActivationLayout {
  int64_t columns;  // padded
  int group;        // G
  int zero;         // of a symmetric matrix; -1 where there are bases
  int parts;        // sums of a column: 2 where blocks are 16 long, else 1
  int digits;
  bool amx;         // as LinearKernels::amx_min_rows says
  bool int16;        // for codes of 16 bits

  bool operator==(const ActivationLayout& o) const {
    return columns == o.columns && group == o.group && zero == o.zero && parts == o.parts &&
           digits == o.digits && amx == o.amx && int16 == o.int16;
  }
  static constexpr int64_t int16_bytes() { return 68; }  // of a column
  int64_t column_bytes() const { return int16 ? int16_bytes() : 36 + 4 * parts; }
  int64_t digit_bytes() const {
    const int64_t bytes = columns * column_bytes();
    return amx ? (bytes + 63) / 64 * 64 : bytes;
  }
  int64_t row_bytes() const { return digits * digit_bytes(); }
};

// Rows in a form, one after the other.
struct Activations {
  ActivationLayout layout;
  const char* data;
};

// G of the layout that there are kernels for: `columns_of` in jinfer/quant/quantized_tensor.py.
inline int64_t columns_of(bool two_level) { return two_level ? 8 : 2; }

// One instruction set's kernels.
struct LinearKernels {
  // Writes the records of one row.
  void (*prepare)(const float* x, int64_t inputs, const ActivationLayout& layout, char* row);
  // y[m * stride + n] of tiles begin .. end - 1 and all rows m of x.
  void (*multiply)(const Matrix& matrix, const Activations& x, int64_t rows, int64_t begin,
                   int64_t end, float* y, int64_t stride);
  // y[n] = activation(y[n]) * up[n].
  void (*glu)(Activation activation, int64_t count, const float* up, float* y);
  // From so many rows on they are multiplied in tiles, to the same bits; 0: there are none.
  int64_t amx_min_rows;
};

// Whether a matrix can be multiplied in tiles: its codes less that of 0 are signed bytes.
inline bool fits_amx(const Matrix& m) {
  return m.bits <= 8 && (m.affine() || m.bits < 8 || m.zero == 128);
}

const LinearKernels& linear_portable();
const LinearKernels& linear_avx2();
const LinearKernels& linear_avxvnni();
const LinearKernels& linear_avx512();
const LinearKernels& linear_avx512bf16();
const LinearKernels& linear_amx();
const LinearKernels& linear_neon();
inline const LinearKernels& linear_kernels() { return JINFER_DISPATCH_DOT(linear); }

}  // namespace jinfer
