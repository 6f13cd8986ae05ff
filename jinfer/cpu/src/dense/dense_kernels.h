// Matmul kernels that compute in float32, compiled once per instruction set.
#pragma once

#include "dense/dense_gemm.h"
#include "rowwise/glu.h"

namespace jinfer {
namespace {

template <class F>
void dispatch_dtype(DType dtype, F f) {
  if (dtype == DType::f32) f(float{});
  if (dtype == DType::bf16) f(BFloat16{});
  if (dtype == DType::f16) f(Float16{});
  if (dtype == DType::e4m3) f(E4M3{});
  if (dtype == DType::i8) f(int8_t{});
}

void multiply_gemv(const DenseMatrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                   float* y, int64_t stride) {
  dispatch_dtype(w.dtype, [&](auto type) {
    if constexpr (sizeof type > 1)
      if (w.transposed)
        return multiply_transposed<decltype(type)>(w, x, rows, begin, end, y, stride);
    gemv<decltype(type)>(w, x, rows, begin, end, y, stride);
  });
}

void multiply_gemm(const DenseMatrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                   float* y, int64_t stride) {
  dispatch_dtype(w.dtype,
                 [&](auto type) { gemm<decltype(type)>(w, x, rows, begin, end, y, stride); });
}

const DenseKernels kDense = {LANES, WIDTH, GEMM_MIN_ROWS, multiply_gemv, pack, multiply_gemm, glu};

}  // namespace
}  // namespace jinfer
