// Sums of low-rank terms (LoRA), compiled once per instruction set.
//
// A term is summed in order of its rank and then added to y, for any number of rows.
#pragma once

#include <algorithm>

#include "lora/lora.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

// M rows and N vectors of outputs from n on, of which the last has `count` numbers. `ahead`: where
// the outputs of a later tile begin in the first row of its matrix.
template <int M, int N, class T>
void add_tile(const DenseMatrix& matrix, const T* b, const T* ahead, const float* x,
              const int64_t* rows, int64_t n, int64_t count, const float* y, float* to) {
  const int64_t outputs = matrix.outputs, rank = matrix.inputs;
  Floats sum[M][N] = {};
  for (int64_t r = 0; r < rank; ++r) {
    const T* from = b + r * outputs + n;
    const char* fetched = reinterpret_cast<const char*>(ahead + r * outputs);
#pragma GCC unroll 8
    for (int64_t line = 0; line < int64_t(N * LANES * sizeof(T)); line += 64)
      __builtin_prefetch(fetched + line);
    Floats w[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      w[j] = N > 1 || count == LANES ? load(from + j * LANES) : load_partial(from, count);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats v = broadcast_in_order(x[m * rank + r]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[m][j] = multiply_add(v, w[j], sum[m][j]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const int64_t at = rows[m] * outputs + n;
    if (N > 1 || count == LANES) {
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j)
        store(to + at + j * LANES, load(y + at + j * LANES) + sum[m][j]);
    } else {
      const Floats total = load_partial(y + at, count) + sum[m][0];
      memcpy(to + at, &total, 4 * count);
    }
  }
}

// Outputs begin .. end - 1 of M rows, N vectors at a time.
template <int M, int N, class T>
void add_outputs(const DenseMatrix& matrix, const void* next, const float* x, const int64_t* rows,
                 int64_t begin, int64_t end, const float* y, float* to) {
  // Each row of a rank is a stream of its own, too short for hardware to follow: where a thread's
  // part of a matrix ends, the next adapter's begins.
  constexpr int64_t AHEAD = 512 / sizeof(T);
  const T *b = static_cast<const T*>(matrix.data), *after = static_cast<const T*>(next);
  const auto ahead = [=](int64_t n) {
    const int64_t at = n + AHEAD;
    if (at < end) return b + at;
    return after ? after + std::min(begin + at - end, end - 1) : b + n;
  };
  int64_t n = begin;
  for (; n + N * LANES <= end; n += N * LANES)
    add_tile<M, N, T>(matrix, b, ahead(n), x, rows, n, LANES, y, to);
  for (; n < end; n += LANES)
    add_tile<M, 1, T>(matrix, b, ahead(n), x, rows, n, std::min<int64_t>(LANES, end - n), y, to);
}

template <class T>
void add_rows(const DenseMatrix& matrix, const void* next, const float* x, const int64_t* rows,
              int64_t count, int64_t begin, int64_t end, const float* y, float* to) {
  // Tiles of matrices that later rows need again stay in a cache.
  const int64_t step = count <= MR ? end - begin : 2 * NR * LANES;
  for (int64_t n = begin; n < end; n += step)
    for (int64_t i = 0; i < count; i += MR)
      dispatch_count(std::min<int64_t>(MR, count - i), [&](auto tall) {
        constexpr int M = tall.value, N = M <= 2 ? 2 * NR : NR;
        add_outputs<M, N, T>(matrix, count <= MR ? next : nullptr, x + i * matrix.inputs, rows + i,
                             n, std::min(n + step, end), y, to);
      });
}

void add_terms(const DenseMatrix& b, const void* next, const float* x, const int64_t* rows,
               int64_t count, int64_t begin, int64_t end, const float* y, float* to) {
  if (b.dtype == DType::f32) add_rows<float>(b, next, x, rows, count, begin, end, y, to);
  if (b.dtype == DType::bf16) add_rows<BFloat16>(b, next, x, rows, count, begin, end, y, to);
  if (b.dtype == DType::f16) add_rows<Float16>(b, next, x, rows, count, begin, end, y, to);
  if (b.dtype == DType::i8) add_rows<int8_t>(b, next, x, rows, count, begin, end, y, to);
}

const LoraKernels kLora = {2 * NR * LANES, add_terms};

}  // namespace
}  // namespace jinfer
