// Quantized matmul: the interface between the driver (linear_driver.h) and the kernels of each
// instruction set (linear_kernels.h).
//
// QuantizedTensor's docstring defines the layout of matrices, in the same names: tiles of R rows,
// superblocks of G columns; a column is 32 codes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/activation.h"
#include "common/code_widths.h"
#include "common/isa.h"

namespace jinfer {

struct Matrix {
  const uint32_t* words;
  const void* scales;       // float16, or int8 with steps
  const uint16_t* steps;    // float16, or null
  const uint8_t* codebook;  // 16 values + 128, or null
  int bits;                 // of a code
  int per_code;             // weights in a code: 1, or 2 for 11 x + y
  int block;
  int numbers;  // of a block: 1 scale, 2 scale and base
  int zero;     // code of 0 in symmetric formats
  int R, G;
  int64_t tiles, superblocks, outputs, inputs;

  bool affine() const { return numbers == 2; }
  int64_t columns() const { return superblocks * per_code * G; }
  // Weights of a row in a superblock; superblocks that share a block's numbers.
  int width() const { return 32 * G * per_code; }
  int shared() const { return std::max(1, block / width()); }
};

// Kernels that read rows of activations.
enum class ActivationForm {
  records,     // dot products of bytes
  tiles,       // AMX tiles of bytes
  int16,       // 16-bit codes
  bf16_tiles,  // AMX tiles of bfloat16
};

// Layout of activations for a matrix. In `records` it is a record for each group of G columns,
// which holds
//
//   int8 codes[8][G][4]      4-byte word s of each column side by side, so that one load, repeated
//                            over the vector if G < L, is what a vector of codes is multiplied with
//   float scales[G]          a code's value
//   int32 sums[parts][G]     -zero * sum of codes where the matrix is symmetric, else as float32
//                            the sum of the values
//
// In `tiles` a row has int8 codes[columns][32], float scales[columns] and
// int32 sums[parts][columns]; in `bf16_tiles` bfloat16 values[columns][32], in an odd number of
// cache lines, so that the 16 rows of a tile do not share a set of the cache.
//
// In `int16` a record holds integers of 14 bits, a single digit:
//
//   int16 codes[16][G][2]    word s of each column side by side
//   float scales[G]
//
// A row may have several digits, most significant first. Kernels treat each as a row, whose scales
// are kBase (linear_activations.h) times the next digit's, and add up the products.
struct ActivationLayout {
  int64_t columns;  // padded
  int group;        // G
  int zero;         // of a symmetric matrix; -1: affine
  int parts;        // sums of a column: 2 where blocks are 16 long, else 1
  int digits;
  ActivationForm form;

  bool operator==(const ActivationLayout& o) const {
    return columns == o.columns && group == o.group && zero == o.zero && parts == o.parts &&
           digits == o.digits && form == o.form;
  }
  static constexpr int64_t int16_bytes() { return 68; }  // of a column
  int64_t column_bytes() const {
    return form == ActivationForm::int16        ? int16_bytes()
           : form == ActivationForm::bf16_tiles ? 64
                                                : 36 + 4 * parts;
  }
  int64_t digit_bytes() const {
    const int64_t bytes = columns * column_bytes();
    if (form == ActivationForm::bf16_tiles) return (columns | 1) * 64;
    return form == ActivationForm::tiles ? (bytes + 63) / 64 * 64 : bytes;
  }
  int64_t row_bytes() const { return digits * digit_bytes(); }
};

// Rows in a layout, one after the other.
struct Activations {
  ActivationLayout layout;
  const char* data;
};

// G that kernels support: `columns_of` in jinfer/quant/quantized_tensor.py.
inline int64_t columns_of(bool two_level) { return two_level ? 8 : 2; }

// Kernels of an instruction set.
struct LinearKernels {
  // Quantizes one row.
  void (*prepare)(const float* x, int64_t inputs, const ActivationLayout& layout, char* row);
  // y[m * stride + n] for tiles begin .. end - 1 and all rows m of x.
  void (*multiply)(const Matrix& matrix, const Activations& x, int64_t rows, int64_t begin,
                   int64_t end, float* y, int64_t stride);
  // y[n] = activation(y[n]) * up[n].
  void (*glu)(Activation activation, int64_t count, const float* up, float* y);
  // Rows from which AMX tiles are used, with the same bits; 0: never.
  int64_t amx_min_rows;
  // Rows from which tiles of bfloat16 are used if `kBf16Prompts` is asked for; 0: never.
  int64_t bf16_min_rows;
};

// As a number of digits: one, but bfloat16 for many rows where there are such kernels.
constexpr int64_t kBf16Prompts = -1;

// Whether a matrix fits AMX tiles: codes minus the code of 0 are signed bytes.
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
