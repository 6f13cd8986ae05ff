// The kernels that multiply with float32, for the instructions that the including file is compiled for.
#pragma once

#include "dense/dense_gemm.h"
#include "rowwise/glu.h"

namespace jinfer {
namespace {

template <class F>
void typed(Kind kind, F f) {
  if (kind == Kind::f32) f(float{});
  if (kind == Kind::bf16) f(Bfloat{});
  if (kind == Kind::f16) f(Half{});
}

void multiply_few(const Dense& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                  float* y, int64_t stride) {
  typed(w.kind, [&](auto type) {
    if (w.transposed) return across<decltype(type)>(w, x, rows, begin, end, y, stride);
    few<decltype(type)>(w, x, rows, begin, end, y, stride);
  });
}

void multiply_many(const Dense& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                   float* y, int64_t stride) {
  typed(w.kind, [&](auto type) { many<decltype(type)>(w, x, rows, begin, end, y, stride); });
}

const DenseKernels kDense = {LANES, WIDTH, MANY, multiply_few, arrange, multiply_many, gate};

}  // namespace
}  // namespace jinfer
