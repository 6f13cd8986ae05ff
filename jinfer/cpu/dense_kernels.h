// Products with plain matrices, for the instructions that the including file is compiled for.
//
// For few rows of activations, weights are read as they stand: rows of weights times rows of
// activations, whose sums are added up over the lanes at the end. For many rows weights are turned
// into panels of float32 columns first, so that nothing is added up over lanes and 16-bit weights are
// converted once.
#pragma once

#include <algorithm>

#include "dense.h"
#include "lanes.h"

namespace jinfer {
namespace {

constexpr int WIDTH = WIDE * LANES;  // outputs of a panel
constexpr int DEPTH = 256;           // inputs of a panel, which stays in the second-level cache

// f(std::integral_constant<int, n>) for 1 <= n <= TALL.
template <class F>
void counted(int64_t n, F f) {
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

// sums[m * LANES + n] = x[m] . weight[n] for M rows and N outputs, yet to be added up over lanes.
//
// Rows of weights are too short for the processor to see by itself where reading goes on: each is
// read some lines ahead, and beyond its end the row that follows N rows later.
template <int M, int N, class T>
void multiply_rows(const float* x, int64_t inputs, const T* const* weight, Floats* sums) {
  constexpr int64_t LINE = 64 / sizeof(T), AHEAD = 16 * LINE;
  Floats sum[M][N] = {};
  auto add = [&](auto load_from, int64_t i) __attribute__((always_inline)) {
    Floats w[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) w[n] = load_from(weight[n] + i);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats v = load_from(x + m * inputs + i);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] += v * w[n];
    }
  };
  int64_t i = 0;
  for (; i + LINE <= inputs; i += LINE) {
    const int64_t ahead = i + AHEAD < inputs ? i + AHEAD : i + AHEAD + (N - 1) * inputs;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) __builtin_prefetch(weight[n] + ahead);
#pragma GCC unroll 8
    for (int j = 0; j < LINE; j += LANES) add([](auto* from) { return load(from); }, i + j);
  }
  for (; i + LANES <= inputs; i += LANES) add([](auto* from) { return load(from); }, i);
  if (i < inputs) add([=](auto* from) { return load_some(from, inputs - i); }, i);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m * LANES + n] = sum[m][n];
}

template <class T>
void few(const Dense& w, const float* x, int64_t rows, int64_t begin, int64_t end, float* y,
         int64_t stride) {
  const T* weights = static_cast<const T*>(w.data);
  for (int64_t n = begin; n < end; n += LANES) {
    const int64_t count = std::min<int64_t>(LANES, end - n);
    for (int64_t m = 0; m < rows; m += TALL)
      counted(std::min<int64_t>(TALL, rows - m), [&](auto tall) {
        constexpr int M = tall.value, N = std::min(LANES, M <= 2 ? 2 * WIDE : WIDE);
        Floats all[M * LANES];
        if (count < LANES) std::fill(all, all + M * LANES, Floats{});
        for (int j = 0; j < count; j += N) {
          const T* some[N];  // the last one again where there are no more
          for (int i = 0; i < N; ++i) some[i] = weights + std::min(n + j + i, end - 1) * w.inputs;
          multiply_rows<M, N>(x + m * w.inputs, w.inputs, some, all + j);
        }
        for (int i = 0; i < M; ++i) {
          const Floats out = sums(all + i * LANES);
          memcpy(y + (m + i) * stride + n, &out, 4 * count);
        }
      });
  }
}

// Inputs first .. first + depth - 1 of `count` outputs from n on as columns: [depth][WIDTH]. Other
// outputs of the same vector repeat the last.
template <class T>
void to_panel(const Dense& w, int64_t n, int64_t count, int64_t first, int64_t depth,
              float* panel) {
  const T* weights = static_cast<const T*>(w.data) + n * w.inputs + first;
  for (int j = 0; j < count; j += LANES) {
    // What is read next: the same inputs of other outputs, at last more inputs of the first ones.
    const int64_t next = j + LANES < count ? LANES * w.inputs : DEPTH - j * w.inputs;
    for (int64_t d = 0; d < depth; d += LANES) {
      Floats x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        const T* from = weights + std::min<int64_t>(j + i, count - 1) * w.inputs + d;
        __builtin_prefetch(from + next);
        x[i] = d + LANES <= depth ? load(from) : load_some(from, depth - d);
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store(panel + (d + i) * WIDTH + j, x[i]);
    }
  }
}

// y[m][n] = x[m] . panel[..][n], added to what is there or not, for M rows and WIDTH outputs.
template <int M>
void multiply_panel(const float* x, int64_t inputs, const float* panel, int64_t depth, bool add,
                    float* y, int64_t stride) {
  Floats sum[M][WIDE];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < WIDE; ++w) sum[m][w] = add ? load(y + m * stride + w * LANES) : Floats{};
  for (int64_t d = 0; d < depth; ++d) {
    Floats column[WIDE];
#pragma GCC unroll 8
    for (int w = 0; w < WIDE; ++w) column[w] = load(panel + d * WIDTH + w * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats v = all(x[m * inputs + d]);
#pragma GCC unroll 8
      for (int w = 0; w < WIDE; ++w) sum[m][w] += v * column[w];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < WIDE; ++w) store(y + m * stride + w * LANES, sum[m][w]);
}

template <class T>
void many(const Dense& w, const float* x, int64_t rows, int64_t begin, int64_t end, float* y,
          int64_t stride) {
  alignas(64) static thread_local float panel[DEPTH * WIDTH];
  for (int64_t n = begin; n < end; n += WIDTH) {
    const int64_t count = std::min<int64_t>(WIDTH, end - n);
    for (int64_t first = 0; first < w.inputs; first += DEPTH) {
      const int64_t depth = std::min<int64_t>(DEPTH, w.inputs - first);
      const bool add = first > 0;
      to_panel<T>(w, n, count, first, depth, panel);
      for (int64_t m = 0; m < rows; m += TALL)
        counted(std::min<int64_t>(TALL, rows - m), [&](auto tall) {
          constexpr int M = tall.value;
          const float* from = x + m * w.inputs + first;
          float* to = y + m * stride + n;
          if (count == WIDTH) {
            multiply_panel<M>(from, w.inputs, panel, depth, add, to, stride);
            return;
          }
          float whole[M * WIDTH] = {};
          for (int i = 0; i < M && add; ++i) memcpy(whole + i * WIDTH, to + i * stride, 4 * count);
          multiply_panel<M>(from, w.inputs, panel, depth, add, whole, WIDTH);
          for (int i = 0; i < M; ++i) memcpy(to + i * stride, whole + i * WIDTH, 4 * count);
        });
    }
  }
}

void multiply(const Dense& w, const float* x, int64_t rows, int64_t begin, int64_t end, float* y,
              int64_t stride) {
  // A panel of a narrow matrix would be mostly empty.
  const bool is_few = rows <= FEW_ROWS || w.outputs < WIDTH;
  auto run = [&](auto type) {
    using T = decltype(type);
    (is_few ? few<T> : many<T>)(w, x, rows, begin, end, y, stride);
  };
  if (w.kind == Kind::f32) run(float{});
  if (w.kind == Kind::bf16) run(Bfloat{});
  if (w.kind == Kind::f16) run(Half{});
}

const DenseKernels kernels = {LANES, WIDTH, multiply, gate};

}  // namespace
}  // namespace jinfer
