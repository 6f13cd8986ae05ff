// Attention's two matrix products: query x key scores, and weights x values.
//
// There are forms for few and for many rows, and for several types of keys and values. All add in
// the same order, so a row's bits do not depend on the form: scores over the head's
// dimensions in order, results over the keys in order.
#pragma once

#include "attention/kv_quant.h"

namespace jinfer {
namespace {

constexpr int FEW_ROWS = MR;  // most rows for which plain keys are not transposed
constexpr int CHUNK = 32;     // vectors decoded at a time: they stay in L1

template <class T>
constexpr int LINE = 64 / sizeof(T);  // numbers of a cache line

static_assert(BLOCK_KEYS % (NR * LANES) == 0 && BLOCK_KEYS % CHUNK == 0 && CHUNK % (2 * LANES) == 0,
              "blocks are of whole tiles");

// scores[m][j] = q[m] . keys[j] for up to FEW_ROWS rows; scores from `count` on are arbitrary.
// Memory `ahead` of the keys is prefetched for the next block.
template <int M, class T>
void scores_in_place(const float* q, int64_t q_stride, const T* keys, int64_t stride, int64_t ahead,
                     int count, int dim, float* scores) {
  const int groups = (count + LANES - 1) / LANES;
  const T* at[BLOCK_KEYS];
  for (int j = 0; j < groups * LANES; ++j) at[j] = keys + std::min(j, count - 1) * stride;
  for (int m = 0; m < M; ++m)
    std::fill(scores + m * BLOCK_KEYS, scores + m * BLOCK_KEYS + groups * LANES, 0.0f);
  for (int d = 0; d < dim; d += LANES)
  // Interleaves the sums of several keys: a key's own additions depend on each other.
#pragma GCC unroll 1
    for (int g = 0; g < groups; ++g) {
      Floats x[LANES], sum[M];
      load_transposed(at + g * LANES, d, x);
      if (d % LINE<T> == 0)
        for (int i = 0; i < LANES; ++i) __builtin_prefetch(at[g * LANES + i] + d + ahead, 0, 2);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m] = load(scores + m * BLOCK_KEYS + g * LANES);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
          sum[m] = multiply_add(broadcast(q[m * q_stride + d + i]), x[i], sum[m]);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) store(scores + m * BLOCK_KEYS + g * LANES, sum[m]);
    }
}

// Keys as columns [dim][BLOCK_KEYS]; columns from `count` on are arbitrary, up to whole vectors.
template <class T>
void transpose_keys(const T* keys, int64_t stride, int count, int dim, float* columns) {
  for (int j = 0; j < count; j += LANES) {
    const T* at[LANES];
    for (int i = 0; i < LANES; ++i) at[i] = keys + std::min(j + i, count - 1) * stride;
    for (int d = 0; d < dim; d += LANES) {
      Floats x[LANES];
      load_transposed(at, d, x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store(columns + (d + i) * BLOCK_KEYS + j, x[i]);
    }
  }
}

// The same for quantized keys; `turned` has room for the words of LANES vectors.
inline void transpose_keys(const CachedVectors& cache, int64_t vector, int count, Words* turned,
                           float* columns) {
  each_width(cache.format.bits, [&](auto bits) {
    for (int j = 0; j < count; j += LANES) {
      int64_t at[LANES];
      for (int i = 0; i < LANES; ++i) at[i] = vector + std::min(j + i, count - 1);
      decode_transposed<bits.value>(
          cache, at, turned, [&](int d, Floats x) __attribute__((always_inline)) {
            store(columns + int64_t(d) * BLOCK_KEYS + j, x);
          });
    }
  });
}

// scores[m][j] = q[m] . keys[j] for keys as columns.
template <int M>
void scores_of_transposed(const float* q, int q_stride, const float* keys, int dim, float* scores) {
  for (int n = 0; n < BLOCK_KEYS; n += NR * LANES) {
    Floats sum[M][NR] = {};
    for (int d = 0; d < dim; ++d) {
      Floats k[NR];
#pragma GCC unroll 8
      for (int w = 0; w < NR; ++w) k[w] = load(keys + d * BLOCK_KEYS + n + w * LANES);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        Floats x = broadcast_in_order(q[m * q_stride + d]);
#pragma GCC unroll 8
        for (int w = 0; w < NR; ++w) sum[m][w] = multiply_add(x, k[w], sum[m][w]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int w = 0; w < NR; ++w) store(scores + m * BLOCK_KEYS + n + w * LANES, sum[m][w]);
  }
}

// out[m] = out[m] * keep[m] + sum over j of weights[m][j] * values[j], for W vectors of values.
template <int M, int W, bool few, class T>
void accumulate_vectors(const float* weights, const T* values, int64_t stride, int64_t ahead,
                        int count, const float* keep, float* out, int64_t out_stride) {
  Floats sum[M][W];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sum[m][w] = load(out + m * out_stride + w * LANES) * keep[m];
  for (int j = 0; j < count; ++j) {
    Floats v[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) {
      v[w] = load(values + j * stride + w * LANES);
      if (few && w * LANES % LINE<T> == 0)
        __builtin_prefetch(values + j * stride + w * LANES + ahead, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Floats x = broadcast_in_order(weights[m * BLOCK_KEYS + j]);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) sum[m][w] = multiply_add(x, v[w], sum[m][w]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) store(out + m * out_stride + w * LANES, sum[m][w]);
}

template <int M, bool few, class T>
void accumulate_values(const float* weights, const T* values, int64_t stride, int64_t ahead,
                       int count, int dim, const float* keep, float* out, int64_t out_stride) {
  int d = 0;
  for (; d + NR * LANES <= dim; d += NR * LANES)
    accumulate_vectors<M, NR, few>(weights, values + d, stride, ahead, count, keep, out + d,
                                   out_stride);
  for (; d < dim; d += LANES)
    accumulate_vectors<M, 1, few>(weights, values + d, stride, ahead, count, keep, out + d,
                                  out_stride);
}

}  // namespace
}  // namespace jinfer
