// GEMV and GEMM for plain matrices, compiled once per instruction set.
//
// GEMV (few rows) reads weights as stored: rows of weights times rows of activations, whose vector
// sums are reduced at the end. GEMM (many rows) first packs weights into panels of float32 columns,
// so nothing is reduced across lanes and 16-bit weights are converted once.
//
// Both add in the same order, so the bits of a result do not depend on the number of rows: sum i <
// LANES is over inputs i, i + LANES, ... in order; `horizontal_sums` adds these.
#pragma once

#include <algorithm>

#include "common/scratch.h"
#include "dense/dense.h"
#include "dense/scaled_row.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

constexpr int WIDTH = NR * LANES;  // outputs of a panel
// Rows from which packing a panel pays off.
constexpr int GEMM_MIN_ROWS = LANES == 16 ? 96 : 48;

// Multiply-add of weights of type T with factors.
template <class T>
struct MulAdd {
  using Factor = float;
  static Floats broadcast(const float* x) { return broadcast_in_order(*x); }
  static Floats add(Floats sum, Floats x, Floats weight) { return sum + x * weight; }
};

template <class T>
using Factor = typename MulAdd<T>::Factor;

// Whether so few rows are bound by memory, so that the order of loads matters.
constexpr bool is_memory_bound(int rows) { return LANES == 8 && rows <= 2; }

// sums[m * LANES + n] = x[m] . weight[n] for M rows and N outputs, as vectors yet to be reduced;
// outputs are neighbours in memory. AHEAD: prefetch distance in bytes, in the order of memory, as
// `gemv` explains; 0: none.
template <int M, int N, int AHEAD, class T>
void multiply_rows(const Factor<T>* x, int64_t inputs, const Row<T>* weight, Floats* sums) {
  constexpr int64_t LINE = 64 / sizeof(T);
  const char* ahead = address(weight[0]) + AHEAD;
  const bool fetch = AHEAD > 0 && (M > 1 || !prefers_hardware_prefetch());
  Floats sum[M][N] = {};
  auto add = [&](auto load_from, int64_t i) __attribute__((always_inline)) {
    if constexpr (is_memory_bound(M)) {  // activations first: weights then stream from memory
      Floats v[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) v[m] = in_register(load_from(x + m * inputs + i));
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const Floats w = load_from(weight[n] + i);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) sum[m][n] = MulAdd<T>::add(sum[m][n], v[m], w);
      }
      return;
    }
    Floats w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] = load_from(weight[n] + i);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats v =
          N > 1 ? in_register(load_from(x + m * inputs + i)) : load_from(x + m * inputs + i);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = MulAdd<T>::add(sum[m][n], v, w[n]);
    }
  };
  int64_t i = 0;
  for (; i + LINE <= inputs; i += LINE) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      if (fetch) __builtin_prefetch(ahead + 64 * n, 0, 2);
    ahead += 64 * N;
#pragma GCC unroll 8
    for (int j = 0; j < LINE; j += LANES) add([](auto from) { return load(from); }, i + j);
  }
  for (; i + LANES <= inputs; i += LANES) add([](auto from) { return load(from); }, i);
  if (i < inputs) add([=](auto from) { return load_partial(from, inputs - i); }, i);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m * LANES + n] = sum[m][n];
}

// Outputs `begin` to `end` - 1 of M rows, N at a time.
template <int M, int N, int AHEAD, class T>
void gemv_outputs(const DenseMatrix& w, const Factor<T>* x, int64_t begin, int64_t end, float* y,
                  int64_t stride) {
  for (int64_t n = begin; n < end; n += LANES) {
    const int64_t count = std::min<int64_t>(LANES, end - n);
    Floats all[M * LANES];
    if (count < LANES) std::fill(all, all + M * LANES, Floats{});
    for (int j = 0; j < count; j += N) {
      Row<T> some[N];  // the last one repeated
      for (int i = 0; i < N; ++i) some[i] = row_of<T>(w, std::min(n + j + i, end - 1));
      multiply_rows<M, N, AHEAD, T>(x, w.inputs, some, all + j);
    }
    for (int i = 0; i < M; ++i) {
      const Floats out = horizontal_sums(all + i * LANES);
      if (count == LANES)
        store(y + i * stride + n, out);
      else
        memcpy(y + i * stride + n, &out, 4 * count);
    }
  }
}

// The best way to stream weights depends on processor and row length. Hardware prefetchers follow
// long rows, several in parallel, best without software prefetch. Short rows end before the
// hardware locks on: there the next memory is prefetched NEAR ahead, two rows at a time. More than
// two rows of activations are compute-bound. With vectors of 16 one row of weights is read at a
// time, prefetched FAR ahead into L2 unless the hardware does better alone
// (prefers_hardware_prefetch). Shorter vectors take several rows, since a single sum would wait for
// itself, and so does FP8, which has fewer bytes to wait for.
template <class T>
void gemv(const DenseMatrix& w, const Factor<T>* x, int64_t rows, int64_t begin, int64_t end,
          float* y, int64_t stride) {
  constexpr int NEAR = 2560, FAR = 24 << 10, LONG = 4096;
  // Weights that later rows need again stay in a cache.
  const bool once = rows <= MR, near = once && w.inputs * sizeof(T) < LONG;
  const int64_t step = once ? end - begin : LANES;
  for (int64_t n = begin; n < end; n += step) {
    const int64_t to = std::min(n + step, end);
    for (int64_t m = 0; m < rows; m += MR)
      dispatch_count(std::min<int64_t>(MR, rows - m), [&](auto tall) {
        constexpr int M = tall.value;
        const Factor<T>* from = x + m * w.inputs;
        float* result = y + m * stride;
        if constexpr (is_memory_bound(M)) {
          return near ? gemv_outputs<M, 2, NEAR, T>(w, from, n, to, result, stride)
                      : gemv_outputs<M, 4, 0, T>(w, from, n, to, result, stride);
        } else {
          constexpr int ONE = LANES < 16 ? 2 * NR : is_scaled<T> ? NR : 1;
          constexpr int N = std::min(LANES, M == 1 ? ONE : M == 2 ? 2 * NR : NR);
          return gemv_outputs<M, N, FAR, T>(w, from, n, to, result, stride);
        }
      });
  }
}

// y[m][..] = sum over i of x[m][i] times row i of a transposed weight, for M rows and the first
// `count` of N vectors of outputs; in order of i for any number of rows.
template <int M, int N, class T>
void multiply_transposed_tile(const float* x, int64_t inputs, const T* weight, int64_t outputs,
                              int64_t count, float* y, int64_t stride) {
  Floats sum[M][N] = {};
  const bool whole = count == N * LANES;
  for (int64_t i = 0; i < inputs; ++i) {
    const T* row = weight + i * outputs;
    Floats w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] = whole ? load(row + n * LANES) : load_partial(row, count);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats v = broadcast(x[m * inputs + i]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] += v * w[n];
    }
  }
  // Copied first: sums whose address is taken would be stored in each step.
  Floats out[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) out[m][n] = sum[m][n];
  for (int m = 0; m < M; ++m) memcpy(y + m * stride, out[m], 4 * count);
}

template <class T>
void multiply_transposed(const DenseMatrix& w, const float* x, int64_t rows, int64_t begin,
                         int64_t end, float* y, int64_t stride) {
  const T* weights = static_cast<const T*>(w.data);
  for (int64_t n = begin; n < end;) {
    const bool wide = end - n >= WIDTH;
    const int64_t count = wide ? WIDTH : std::min<int64_t>(LANES, end - n);
    for (int64_t m = 0; m < rows; m += MR)
      dispatch_count(std::min<int64_t>(MR, rows - m), [&](auto tall) {
        constexpr int M = tall.value;
        const float* from = x + m * w.inputs;
        float* to = y + m * stride + n;
        if (wide) {
          multiply_transposed_tile<M, NR>(from, w.inputs, weights + n, w.outputs, count, to,
                                          stride);
        } else {
          multiply_transposed_tile<M, 1>(from, w.inputs, weights + n, w.outputs, count, to, stride);
        }
      });
    n += count;
  }
}

// Inputs of a row per lane.
inline int64_t steps(int64_t inputs) { return (inputs + LANES - 1) / LANES; }

// Packs a row's inputs by lane: [LANES][steps], zero-padded.
void pack(const float* x, int64_t inputs, float* to) {
  const int64_t each = steps(inputs);
  for (int64_t step = 0; step < each; step += LANES) {
    Floats block[LANES];
    for (int i = 0; i < LANES; ++i) {
      const int64_t from = (step + i) * LANES;
      block[i] = load_padded(x + from, inputs - from);
    }
    transpose(block);
    const int64_t count = std::min<int64_t>(LANES, each - step);
    for (int i = 0; i < LANES; ++i) memcpy(to + i * each + step, &block[i], 4 * count);
  }
}

// Floats from one lane of a panel to the next; not a power of 2, which would map to one cache set.
inline int64_t panel_stride(int64_t each) { return (each | 1) * WIDTH; }

// Packs `count` outputs from n on as columns, in the order of `pack`: [LANES][steps][WIDTH]. Other
// columns repeat the last output.
template <class T>
void to_panel(const DenseMatrix& w, int64_t n, int64_t count, float* panel) {
  const int64_t each = steps(w.inputs), stride = panel_stride(each);
  for (int j = 0; j < count; j += LANES)
    for (int64_t step = 0; step < each; ++step) {
      const int64_t d = step * LANES;
      Floats x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        const Row<T> from = row_of<T>(w, n + std::min<int64_t>(j + i, count - 1)) + d;
        __builtin_prefetch(address(from) + LANES * w.inputs * sizeof(T));  // the panel after next
        x[i] = d + LANES <= w.inputs ? load(from) : load_partial(from, w.inputs - d);
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store(panel + i * stride + step * WIDTH + j, x[i]);
    }
}

// y[m][n] = x[m] . panel[..][n] for MR rows and the panel's outputs. `horizontal_sums` adds lanes
// LANES / 2 apart first and neighbours last; here lanes are visited so that partial sums complete
// early.
template <class T>
void multiply_panel(const float* x, const float* panel, int64_t each, float* y, int64_t stride) {
  constexpr int LEVELS = __builtin_ctz(LANES);
  Floats kept[LEVELS + 1][MR][NR];
  for (int turn = 0; turn < LANES; ++turn) {
    int lane = 0;
    for (int i = 0; i < LEVELS; ++i) lane |= (turn >> i & 1) << (LEVELS - 1 - i);
    const float* own = x + lane * each;
    const float* columns = panel + lane * panel_stride(each);
    Floats sum[MR][NR] = {};
    for (int64_t step = 0; step < each; ++step) {
      Floats column[NR];
#pragma GCC unroll 8
      for (int w = 0; w < NR; ++w) column[w] = load(columns + step * WIDTH + w * LANES);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const Floats v = MulAdd<T>::broadcast(own + m * LANES * each + step);
#pragma GCC unroll 8
        for (int w = 0; w < NR; ++w) sum[m][w] = MulAdd<T>::add(sum[m][w], v, column[w]);
      }
    }
    int level = 0;
    for (; turn >> level & 1; ++level)
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int w = 0; w < NR; ++w) sum[m][w] += kept[level][m][w];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
      for (int w = 0; w < NR; ++w) kept[level][m][w] = sum[m][w];
  }
  for (int m = 0; m < MR; ++m) memcpy(y + m * stride, kept[LEVELS][m], sizeof kept[LEVELS][m]);
}

template <class T>
void gemm(const DenseMatrix& w, const float* x, int64_t rows, int64_t begin, int64_t end, float* y,
          int64_t stride) {
  const int64_t each = steps(w.inputs), row = LANES * each;
  static thread_local Scratch scratch;
  float* panel = scratch.of(LANES * panel_stride(each));
  for (int64_t n = begin; n < end; n += WIDTH) {
    const int64_t count = std::min<int64_t>(WIDTH, end - n);
    to_panel<T>(w, n, count, panel);
    for (int64_t i = 0; i < rows; i += MR) {
      const int64_t m = std::min(i, rows - MR);  // repeats some rows at the end
      if (count == WIDTH) {
        multiply_panel<T>(x + m * row, panel, each, y + m * stride + n, stride);
        continue;
      }
      float whole[MR * WIDTH];
      multiply_panel<T>(x + m * row, panel, each, whole, WIDTH);
      for (int k = 0; k < MR; ++k) memcpy(y + (m + k) * stride + n, whole + k * WIDTH, 4 * count);
    }
  }
}

}  // namespace
}  // namespace jinfer
