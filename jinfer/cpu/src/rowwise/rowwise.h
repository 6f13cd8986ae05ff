// Row-wise operations: norms, RoPE, Hadamard transforms, softmax, activations, sums,
// argmax. A row's bits depend on the row alone, unlike those of XLA's sums over the last axis.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/isa.h"

namespace jinfer {

struct Norm {
  bool centered;        // LayerNorm, else RMSNorm
  float eps, offset;    // offset: added to weights
  const float* weight;  // [size], or null: 1
  const float* bias;    // [size], or null: 0
};

struct Rotation {
  int64_t size, pairs;  // of a head, whose first 2 * pairs numbers are rotated
  bool adjacent;        // pairs are neighbours; else `pairs` apart
};

struct Hadamard {
  int64_t size;  // of a head
  bool query;    // else a key; the two scalings cancel in scores
};

struct Argmax {
  float value;
  int64_t at;    // first index
  bool has_nan;  // the rest is meaningless
};

struct RowwiseKernels {
  // y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + offset) + bias, mean = 0 if not
  // centered.
  void (*norm)(const float* x, int64_t size, const Norm& norm, float* y);
  // Products are rounded before they are added, as XLA's are; size is that of x.
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t size,
                 const Rotation& rotation, float* y);
  // Signs, powers of two and sums of two numbers only; see jinfer/ops/attention/hadamard.py.
  void (*hadamard)(const float* x, int64_t size, const Hadamard& hadamard, float* y);
  void (*softmax)(const float* x, int64_t size, float* y);
  void (*activate)(const float* x, Activation activation, int64_t size, float* y);
  void (*add)(const float* a, const float* b, int64_t size, float* y);
  void (*multiply)(const float* a, const float* b, int64_t size, float* y);
  // The sum of rows `places` of x times their weights; products are rounded before they are added.
  void (*weighted_sum)(const float* x, const int32_t* places, const float* weights, int64_t count,
                       int64_t size, float* y);
  void (*scale)(const float* x, float factor, int64_t size, float* y);
  Argmax (*argmax)(const float* x, int64_t size);  // size > 0
};

const RowwiseKernels& rowwise_portable();
const RowwiseKernels& rowwise_avx2();
const RowwiseKernels& rowwise_avx512();
inline const RowwiseKernels& rowwise_kernels() { return JINFER_DISPATCH(rowwise); }

}  // namespace jinfer
