// Products with plain matrices, for the instructions that the including file is compiled for.
//
// For few rows of activations, weights are read as they stand: rows of weights times rows of
// activations, whose sums are added up over the lanes at the end. For many rows weights are turned
// into panels of float32 columns first, so that nothing is added up over lanes and 16-bit weights are
// converted once.
//
// Both add in the same order, so that the bits of a result do not tell how many rows there were: sum
// i < LANES is of inputs i, i + LANES, ... one after the other; `sums` says how these are added.
#pragma once

#include <algorithm>

#include "common/scratch.h"
#include "dense/dense.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

constexpr int WIDTH = NR * LANES;  // outputs of a panel
// Rows from which a panel is worth making: measured on one core, equal at about so many.
constexpr int GEMM_MIN_ROWS = LANES == 16 ? 96 : 48;

// What numbers of type T are multiplied with, and how they are added up.
template <class T>
struct MulAdd {
  using Factor = float;
  static Floats broadcast(const float* x) { return broadcast_in_order(*x); }
  static Floats add(Floats sum, Floats x, Floats weight) { return sum + x * weight; }
};

template <class T>
using Factor = typename MulAdd<T>::Factor;

// f(std::integral_constant<int, n>) for 1 <= n <= MR.
template <class F>
void dispatch_count(int64_t n, F f) {
  static_assert(MR == 6, "the cases below are all there are");
  switch (n) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
  }
}

// Whether so few rows take no longer than their weights take to come, and how these come matters.
constexpr bool is_memory_bound(int rows) { return LANES == 8 && rows <= 2; }

// sums[m * LANES + n] = x[m] . weight[n] for M rows and N outputs, yet to be added up over lanes;
// outputs are neighbours in memory. AHEAD: bytes that weights are fetched ahead, in the order that they
// have in memory, as `few` explains; 0: nothing is fetched.
template <int M, int N, int AHEAD, class T>
void multiply_rows(const Factor<T>* x, int64_t inputs, const T* const* weight, Floats* sums) {
  constexpr int64_t LINE = 64 / sizeof(T);
  const char* ahead = reinterpret_cast<const char*>(weight[0]) + AHEAD;
  const bool fetch = AHEAD > 0 && (M > 1 || !prefers_hardware_prefetch());
  Floats sum[M][N] = {};
  auto add = [&](auto load_from, int64_t i) __attribute__((always_inline)) {
    if constexpr (is_memory_bound(M)) {  // a tenth faster from memory than weights first
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
      const Floats v = N > 1 ? in_register(load_from(x + m * inputs + i)) : load_from(x + m * inputs + i);
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
    for (int j = 0; j < LINE; j += LANES) add([](auto* from) { return load(from); }, i + j);
  }
  for (; i + LANES <= inputs; i += LANES) add([](auto* from) { return load(from); }, i);
  if (i < inputs) add([=](auto* from) { return load_partial(from, inputs - i); }, i);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m * LANES + n] = sum[m][n];
}

// Outputs `begin` to `end` - 1 of M rows, N at a time.
template <int M, int N, int AHEAD, class T>
void gemv_outputs(const DenseMatrix& w, const Factor<T>* x, int64_t begin, int64_t end, float* y,
                 int64_t stride) {
  const T* weights = static_cast<const T*>(w.data);
  for (int64_t n = begin; n < end; n += LANES) {
    const int64_t count = std::min<int64_t>(LANES, end - n);
    Floats all[M * LANES];
    if (count < LANES) std::fill(all, all + M * LANES, Floats{});
    for (int j = 0; j < count; j += N) {
      const T* some[N];  // the last one again where there are no more
      for (int i = 0; i < N; ++i) some[i] = weights + std::min(n + j + i, end - 1) * w.inputs;
      multiply_rows<M, N, AHEAD>(x, w.inputs, some, all + j);
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

// How weights come from memory fastest differs between processors, and with how long their rows are.
//
// A processor sees by itself where reading goes on, if rows are long: a Zen 3 reads four rows of 4 KiB
// and more side by side at the rate of its memory when nothing is fetched, and 0.8 of that otherwise.
// Short rows end too soon. There what comes next in the order of memory is fetched, NEAR before it is
// read: two rows of 1 to 2 KiB then come at that rate, and at 0.85 of it where they are four, or are
// fetched FAR before. More rows of activations than two take longer than memory does.
//
// With vectors of 16 one row of weights is read at a time: one stream of memory, which a Zen 5 reads by
// a tenth faster fetched FAR ahead, into the second-level cache. A Zen 4 is left to itself: a step in
// F16 from huge pages was 1.23 times as fast as from small ones, and 1.04 with all lines fetched. With
// shorter vectors a single sum would wait for itself.
template <class T>
void gemv(const DenseMatrix& w, const Factor<T>* x, int64_t rows, int64_t begin, int64_t end, float* y,
         int64_t stride) {
  constexpr int NEAR = 2560, FAR = 24 << 10, LONG = 4096;
  // What more rows need again stays in a cache meanwhile.
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
          constexpr int ONE = LANES == 16 ? 1 : 2 * NR;
          constexpr int N = std::min(LANES, M == 1 ? ONE : M == 2 ? 2 * NR : NR);
          return gemv_outputs<M, N, FAR, T>(w, from, n, to, result, stride);
        }
      });
  }
}

// y[m][..] = the sum over i of x[m][i] times row i of a transposed weight, for M rows and the first
// `count` of N vectors of outputs; i comes in order whatever rows there are.
template <int M, int N, class T>
void multiply_transposed_tile(const float* x, int64_t inputs, const T* weight, int64_t outputs,
                     int64_t count, float* y, int64_t stride) {
  Floats sum[M][N] = {};
  const bool whole = count == N * LANES;
  for (int64_t i = 0; i < inputs; ++i) {
    const T* row = weight + i * outputs;
    Floats w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      w[n] = whole ? load(row + n * LANES) : load_partial(row, count);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats v = broadcast(x[m * inputs + i]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] += v * w[n];
    }
  }
  // Copied first: sums whose address is taken would be written to memory at each step.
  Floats out[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) out[m][n] = sum[m][n];
  for (int m = 0; m < M; ++m) memcpy(y + m * stride, out[m], 4 * count);
}

template <class T>
void multiply_transposed(const DenseMatrix& w, const float* x, int64_t rows, int64_t begin, int64_t end, float* y,
            int64_t stride) {
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
          multiply_transposed_tile<M, NR>(from, w.inputs, weights + n, w.outputs, count, to, stride);
        } else {
          multiply_transposed_tile<M, 1>(from, w.inputs, weights + n, w.outputs, count, to, stride);
        }
      });
    n += count;
  }
}

// How many of a row's inputs each lane has: sums of few rows take so many steps.
inline int64_t steps(int64_t inputs) { return (inputs + LANES - 1) / LANES; }

// A row's inputs, those of a lane side by side: [LANES][steps], 0 where there are no more.
void pack(const float* x, int64_t inputs, float* to) {
  const int64_t each = steps(inputs);
  for (int64_t step = 0; step < each; step += LANES) {
    Floats block[LANES];
    for (int i = 0; i < LANES; ++i) {
      const int64_t from = (step + i) * LANES, left = inputs - from;
      block[i] = left >= LANES ? load(x + from) : left > 0 ? load_partial(x + from, left) : Floats{};
    }
    transpose(block);
    const int64_t count = std::min<int64_t>(LANES, each - step);
    for (int i = 0; i < LANES; ++i) memcpy(to + i * each + step, &block[i], 4 * count);
  }
}

// Between what a panel has for one lane and for the next: no power of 2, which would be one set of a
// cache.
inline int64_t panel_stride(int64_t each) { return (each | 1) * WIDTH; }

// `count` outputs from n on as columns, in the order of `pack`: [LANES][steps][WIDTH]. Other
// outputs of the same vector repeat the last.
template <class T>
void to_panel(const DenseMatrix& w, int64_t n, int64_t count, float* panel) {
  const int64_t each = steps(w.inputs), stride = panel_stride(each);
  const T* weights = static_cast<const T*>(w.data) + n * w.inputs;
  for (int j = 0; j < count; j += LANES)
    for (int64_t step = 0; step < each; ++step) {
      const int64_t d = step * LANES;
      Floats x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        const T* from = weights + std::min<int64_t>(j + i, count - 1) * w.inputs + d;
        __builtin_prefetch(from + LANES * w.inputs);  // what is read next but one panel
        x[i] = d + LANES <= w.inputs ? load(from) : load_partial(from, w.inputs - d);
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store(panel + i * stride + step * WIDTH + j, x[i]);
    }
}

// y[m][n] = x[m] . panel[..][n] for MR rows and the panel's outputs. `sums` adds lanes that are
// LANES / 2 stack_stride first and neighbours last; here lanes come one after the other, so that what
// belongs together is complete as soon as possible.
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
      const int64_t m = std::min(i, rows - MR);  // some rows twice at the end
      if (count == WIDTH) {
        multiply_panel<T>(x + m * row, panel, each, y + m * stride + n, stride);
        continue;
      }
      float whole[MR * WIDTH];
      multiply_panel<T>(x + m * row, panel, each, whole, WIDTH);
      for (int k = 0; k < MR; ++k)
        memcpy(y + (m + k) * stride + n, whole + k * WIDTH, 4 * count);
    }
  }
}

}  // namespace
}  // namespace jinfer
