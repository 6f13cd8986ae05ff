// Rows of weights as kernels read them: numbers as stored, or E4M3 numbers times their blocks'
// scales.
#pragma once

#include <cstring>
#include <type_traits>

#include "dense/dense.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

// A number of 8 bits: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities.
struct E4M3 {
  uint8_t bits;
};

// From input `at` of a row on. LANES numbers from a multiple of LANES on are in one block.
struct ScaledRow {
  const E4M3* numbers;
  const float* scales;
  int64_t at;
  int block_log2;

  ScaledRow operator+(int64_t i) const { return {numbers, scales, at + i, block_log2}; }
  Floats scale() const { return broadcast(scales[at >> block_log2]); }
};

template <class T>
constexpr bool is_scaled = std::is_same_v<T, E4M3>;
template <class T>
using Row = std::conditional_t<is_scaled<T>, ScaledRow, const T*>;

// Exact: the bits shifted are those of a float16 that is 2^-8 of the number.
inline Floats load(const E4M3* from) {
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  typedef int16_t Halves __attribute__((vector_size(2 * LANES)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  const Halves halves = (__builtin_convertvector(bytes, Halves) << 7) & int16_t(0xbfff);
  Float16 some[LANES];
  memcpy(some, &halves, sizeof some);
  return load(some) * 256.0f;
}

inline Floats load(ScaledRow from) { return load(from.numbers + from.at) * from.scale(); }

inline Floats load_partial(ScaledRow from, int64_t count) {
  return load_partial(from.numbers + from.at, count) * from.scale();
}

template <class T>
const char* address(const T* row) {
  return reinterpret_cast<const char*>(row);
}
inline const char* address(ScaledRow row) { return address(row.numbers + row.at); }

// Row n of a matrix.
template <class T>
Row<T> row_of(const DenseMatrix& w, int64_t n) {
  const T* row = static_cast<const T*>(w.data) + n * w.inputs;
  if constexpr (is_scaled<T>) {
    return {row, w.scales + n * w.row_blocks, 0, w.block_log2};
  } else {
    return row;
  }
}

}  // namespace
}  // namespace jinfer
