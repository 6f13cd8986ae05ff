// The two products of attention, for the instructions that the including file is compiled for.
//
// There are forms for few and for many rows, and for keys and values of several types. All take
// their sums in the same order, so that no bit of a row's result tells which form it came from: a
// score over the head's dimensions one after the other, a result over the keys one after the other.
#pragma once

#include "kept.h"

namespace jinfer {
namespace {

constexpr int FEW = TALL;  // rows up to which keys are not put into columns first
constexpr int SOME = 32;   // vectors decoded at a time: they stay in the fastest memory

static_assert(KEYS % (WIDE * LANES) == 0 && KEYS % SOME == 0 && SOME % (2 * LANES) == 0,
              "blocks are of whole tiles");

// Vectors d .. d + LANES of some keys, turned: x[i] has dimension d + i of each.
template <class T>
inline void load_turned(const T* const* keys, int d, Floats* x) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) x[i] = load(keys[i] + d);
  transpose(x);
}

// scores[m][j] = q[m] . keys[j] for up to FEW rows; those from `count` on are of any key.
template <int M, class T>
void scores_of_few(const float* q, int q_stride, const T* keys, int64_t stride, int count, int dim,
                   float* scores) {
  constexpr int G = 2 * M + LANES + 2 <= REGISTERS ? 2 : 1;  // chains that do not wait
  for (int j = 0; j < count; j += G * LANES) {
    const T* at[G][LANES];
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < LANES; ++i)
        at[g][i] = keys + std::min(j + g * LANES + i, count - 1) * stride;
    Floats sum[G][M] = {};
    for (int d = 0; d < dim; d += LANES)
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        Floats x[LANES];
        load_turned(at[g], d, x);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m)
            sum[g][m] = fused(all(q[m * q_stride + d + i]), x[i], sum[g][m]);
      }
    for (int g = 0; g < G; ++g)
      for (int m = 0; m < M; ++m) store(scores + m * KEYS + j + g * LANES, sum[g][m]);
  }
}

// Keys as columns [dim][KEYS]; those from `count` on are any key, up to whole vectors.
template <class T>
void to_columns(const T* keys, int64_t stride, int count, int dim, float* columns) {
  for (int j = 0; j < count; j += LANES) {
    const T* at[LANES];
    for (int i = 0; i < LANES; ++i) at[i] = keys + std::min(j + i, count - 1) * stride;
    for (int d = 0; d < dim; d += LANES) {
      Floats x[LANES];
      load_turned(at, d, x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store(columns + (d + i) * KEYS + j, x[i]);
    }
  }
}

// scores[m][j] = q[m] . keys[j] for keys as columns.
template <int M>
void scores_of_columns(const float* q, int q_stride, const float* keys, int dim, float* scores) {
  for (int n = 0; n < KEYS; n += WIDE * LANES) {
    Floats sum[M][WIDE] = {};
    for (int d = 0; d < dim; ++d) {
      Floats k[WIDE];
#pragma GCC unroll 8
      for (int w = 0; w < WIDE; ++w) k[w] = load(keys + d * KEYS + n + w * LANES);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        Floats x = all(q[m * q_stride + d]);
#pragma GCC unroll 8
        for (int w = 0; w < WIDE; ++w) sum[m][w] = fused(x, k[w], sum[m][w]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int w = 0; w < WIDE; ++w) store(scores + m * KEYS + n + w * LANES, sum[m][w]);
  }
}

// out[m] = out[m] * keep[m] + sum over j of weights[m][j] * values[j], W vectors of them.
template <int M, int W, class T>
void add_some(const float* weights, const T* values, int64_t stride, int count, const float* keep,
              float* out, int64_t out_stride) {
  Floats sum[M][W];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sum[m][w] = load(out + m * out_stride + w * LANES) * keep[m];
  for (int j = 0; j < count; ++j) {
    Floats v[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) v[w] = load(values + j * stride + w * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Floats x = all(weights[m * KEYS + j]);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) sum[m][w] = fused(x, v[w], sum[m][w]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) store(out + m * out_stride + w * LANES, sum[m][w]);
}

template <int M, class T>
void add_values(const float* weights, const T* values, int64_t stride, int count, int dim,
                const float* keep, float* out, int64_t out_stride) {
  int d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
    add_some<M, WIDE>(weights, values + d, stride, count, keep, out + d, out_stride);
  for (; d < dim; d += LANES)
    add_some<M, 1>(weights, values + d, stride, count, keep, out + d, out_stride);
}

// f(std::integral_constant<int, n>) for 1 <= n <= TALL.
template <class F>
void counted(int n, F f) {
  static_assert(TALL == 6, "the cases below are all there are");
  switch (n) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
  }
}

}  // namespace
}  // namespace jinfer
