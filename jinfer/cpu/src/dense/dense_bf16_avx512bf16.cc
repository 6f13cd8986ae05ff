// Matmul of bfloat16 with AVX-512 BF16 dot products, to the bit what AMX tiles compute
// (dense_bf16_amx.cc): for every 32 inputs, products of even and of odd inputs are added up
// separately, in order, and the sum of both is added to the total.
//
// A dot product adds the second product of a pair before the first. Inputs 0 .. 31 are therefore
// paired as (2, 0), (6, 4) .. (30, 28), (3, 1) .. (31, 29): eight even pairs, then eight odd ones.
#include <algorithm>
#include <cstring>

#include "dense/dense.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

constexpr int DEPTH = 32, PAIRS = DEPTH / 2;  // inputs, and pairs, of a step
constexpr int FEW = 32;             // rows that are multiplied with columns as these are read
constexpr int AHEAD = 8;            // steps that few rows' columns are prefetched ahead
constexpr int STEPS = 8;            // of a panel, for more rows: it stays in the first-level cache
constexpr int ROWS = 4;             // of a panel's sums in registers
constexpr int OUTPUTS = 2 * LANES;  // of a panel
static_assert(LANES == PAIRS);

int64_t pairs_of(int64_t inputs) { return (inputs + DEPTH - 1) / DEPTH * PAIRS; }

// Pairs 32 numbers of 16 bits as described above.
__m512i paired(__m512i numbers) {
  alignas(64) static constexpr auto order = [] {
    struct {
      uint16_t at[DEPTH];
    } from{};
    for (int i = 0; i < DEPTH; ++i) from.at[i] = i % PAIRS / 2 * 4 + (i % 2 ? 0 : 2) + i / PAIRS;
    return from;
  }();
  return _mm512_permutexvar_epi16(_mm512_load_si512(order.at), numbers);
}

// Rounds to nearest even; denormals become 0.
void pack(const float* x, int64_t inputs, int64_t row, int64_t, float* all) {
  float* to = all + row * pairs_of(inputs);
  for (int64_t i = 0; i < inputs; i += DEPTH, to += PAIRS) {
    const Floats low = load_padded(x + i, inputs - i);
    const Floats high = load_padded(x + i + LANES, inputs - i - LANES);
    _mm512_storeu_si512(to, paired((__m512i)_mm512_cvtne2ps_pbh(high, low)));
  }
}

// Columns of 16 outputs and 32 inputs: columns[pair][output]. `count` outputs and `left` inputs
// exist; the others are 0. `next`: memory to prefetch, for the first output.
void load_columns(const uint16_t* weights, int64_t inputs, int64_t count, int64_t left,
                  const uint16_t* next, Floats* columns) {
  const __mmask32 mask = left < DEPTH ? (1u << left) - 1 : ~0u;
#pragma GCC unroll 16
  for (int line = 0; line < LANES; ++line) {
    __builtin_prefetch(next + line * inputs);
    const __mmask32 there = line < count ? mask : 0;
    const __m512i numbers = _mm512_maskz_loadu_epi16(there, weights + line * inputs);
    columns[line] = (Floats)paired(numbers);
  }
  transpose(columns);
}

Floats add_products(Floats sum, Floats x, Floats weights) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weights);
}

// Adds a panel's products with `rows` rows of pairs to y, or sets y to them.
template <int rows, int vectors>
void multiply_panel(const float* x, int64_t pairs, const float* panel, int64_t steps, bool set,
                    int64_t count, float* y, int64_t stride) {
  const auto mask_of = [&](int vector) -> __mmask16 {
    const int64_t left = count - vector * LANES;
    return left < LANES ? (1u << left) - 1 : 0xffff;
  };
  Floats total[rows][vectors];
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < vectors; ++n)
      total[m][n] = _mm512_maskz_loadu_ps(set ? 0 : mask_of(n), y + m * stride + n * LANES);
  for (int64_t step = 0; step < steps; ++step, panel += PAIRS * vectors * LANES, x += PAIRS) {
    Floats even[rows][vectors] = {}, odd[rows][vectors] = {};
#pragma GCC unroll 8
    for (int pair = 0; pair < PAIRS / 2; ++pair) {
      const auto add = [&](auto& sums, int at) __attribute__((always_inline)) {
        Floats weights[vectors];
#pragma GCC unroll 8
        for (int n = 0; n < vectors; ++n) weights[n] = load(panel + (at * vectors + n) * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) {
          const Floats both = _mm512_set1_ps(x[m * pairs + at]);
#pragma GCC unroll 8
          for (int n = 0; n < vectors; ++n) sums[m][n] = add_products(sums[m][n], both, weights[n]);
        }
      };
      add(even, pair);
      add(odd, pair + PAIRS / 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < vectors; ++n) total[m][n] += even[m][n] + odd[m][n];
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < vectors; ++n)
      _mm512_mask_storeu_ps(y + m * stride + n * LANES, mask_of(n), total[m][n]);
}

// Many rows: columns are packed into a panel, [steps][PAIRS][vectors][LANES], once for all.
template <int vectors>
void multiply_many(const DenseMatrix& w, const float* x, int64_t rows, int64_t n, int64_t count,
                   float* y, int64_t stride) {
  alignas(64) float panel[STEPS * PAIRS * vectors * LANES];
  const int64_t pairs = pairs_of(w.inputs);
  const uint16_t* weights = static_cast<const uint16_t*>(w.data) + n * w.inputs;
  for (int64_t i = 0; i == 0 || i < w.inputs; i += STEPS * DEPTH) {  // once if there are none
    const int64_t steps = std::min<int64_t>(STEPS, (w.inputs - i + DEPTH - 1) / DEPTH);
    for (int64_t step = 0; step < steps; ++step)
      for (int vector = 0; vector < vectors; ++vector) {
        Floats columns[LANES];
        const int64_t at = i + step * DEPTH;
        const uint16_t* from = weights + vector * LANES * w.inputs + at;
        load_columns(from, w.inputs, count - vector * LANES, w.inputs - at, from + STEPS * DEPTH,
                     columns);
#pragma GCC unroll 16
        for (int pair = 0; pair < PAIRS; ++pair)
          store(panel + ((step * PAIRS + pair) * vectors + vector) * LANES, columns[pair]);
      }
    for (int64_t row = 0; row < rows;) {
      const auto multiply = [&](auto tall) {
        multiply_panel<tall.value, vectors>(x + row * pairs + i / 2, pairs, panel, steps, i == 0,
                                            count, y + row * stride, stride);
        row += tall.value;
      };
      if (rows - row >= ROWS) {
        multiply(std::integral_constant<int, ROWS>{});
      } else if (rows - row >= 2) {
        multiply(std::integral_constant<int, 2>{});
      } else {
        multiply(std::integral_constant<int, 1>{});
      }
    }
  }
}

// Few rows: `one`, or up to FEW.
template <bool one>
void multiply_few(const DenseMatrix& w, const float* x, int64_t rows, int64_t n, int64_t count,
                  float* y, int64_t stride) {
  const int64_t pairs = pairs_of(w.inputs), tall = one ? 1 : rows;
  const uint16_t* weights = static_cast<const uint16_t*>(w.data) + n * w.inputs;
  Floats totals[one ? 1 : FEW] = {};
  for (int64_t i = 0; i < w.inputs; i += DEPTH, x += PAIRS) {
    Floats columns[LANES];
    int64_t next = i + AHEAD * DEPTH;
    if (next >= w.inputs) next += (LANES - 1) * w.inputs;  // the next outputs
    load_columns(weights + i, w.inputs, count, w.inputs - i, weights + next, columns);
    for (int64_t m = 0; m < tall; ++m) {
      Floats even{}, odd{};
#pragma GCC unroll 8
      for (int pair = 0; pair < PAIRS / 2; ++pair) {
        const float* both = x + m * pairs + pair;
        even = add_products(even, _mm512_set1_ps(both[0]), columns[pair]);
        odd = add_products(odd, _mm512_set1_ps(both[PAIRS / 2]), columns[pair + PAIRS / 2]);
      }
      totals[m] += even + odd;
    }
  }
  const __mmask16 mask = count < LANES ? (1u << count) - 1 : 0xffff;
  for (int64_t m = 0; m < tall; ++m) _mm512_mask_storeu_ps(y + m * stride, mask, totals[m]);
}

void multiply(const DenseMatrix& w, const float* x, int64_t, int64_t first, int64_t count,
              int64_t begin, int64_t end, float* y, int64_t stride) {
  x += first * pairs_of(w.inputs);
  if (count <= FEW) {
    for (int64_t n = begin; n < end; n += LANES)
      (count == 1 ? multiply_few<true> : multiply_few<false>)(
          w, x, count, n, std::min<int64_t>(LANES, end - n), y + n, stride);
    return;
  }
  for (int64_t n = begin; n < end; n += OUTPUTS) {
    const int64_t left = std::min<int64_t>(OUTPUTS, end - n);
    (left > LANES ? multiply_many<2> : multiply_many<1>)(w, x, count, n, left, y + n, stride);
  }
}

const DenseBf16Tiles tiles{OUTPUTS, true, pairs_of, pack, multiply};

}  // namespace
}  // namespace jinfer

const jinfer::DenseBf16Tiles* jinfer::dense_bf16_avx512bf16() { return &jinfer::tiles; }
