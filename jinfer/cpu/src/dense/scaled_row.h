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
  // Of the numbers that `load` gives.
  Floats scale() const { return broadcast(256.0f * scales[at >> block_log2]); }
};

template <class T>
constexpr bool is_scaled = std::is_same_v<T, E4M3>;
template <class T>
using Row = std::conditional_t<is_scaled<T>, ScaledRow, const T*>;

// 2^-8 of the numbers, exactly: their bits shifted are those of a float16.
inline Floats load(const E4M3* from) {
  constexpr int16_t UNCOPIED_SIGN = int16_t(0xbfff);  // the sign is in the bit below its own, too
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
  return _mm512_cvtph_ps(
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(UNCOPIED_SIGN)));
#elif defined(__F16C__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(UNCOPIED_SIGN)));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  typedef int16_t Halves __attribute__((vector_size(2 * LANES)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  const Halves halves = (__builtin_convertvector(bytes, Halves) << 7) & UNCOPIED_SIGN;
  Float16 some[LANES];
  memcpy(some, &halves, sizeof some);
  return load(some);
#endif
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
