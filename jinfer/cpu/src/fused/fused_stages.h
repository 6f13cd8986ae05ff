// Stages of fused layers and their work: row-wise operations, matmuls, attention.
#pragma once

#include <cstdint>
#include <vector>

#include "common/matmul_work.h"
#include "fused/fused_attention.h"
#include "fused/fused_program.h"
#include "rowwise/rowwise.h"

namespace jinfer {
namespace {

// A matrix [rows, size]: an input, or an operation's result.
struct Value {
  int64_t size;
  int64_t stage = -1;        // that computes it; -1: an input
  bool whole = true;         // readable only after the stage, not row by row
  int64_t until = -1;        // the last stage that reads it
  const float* x = nullptr;  // to read
  float* y = nullptr;        // to write
  int64_t early = 0;         // earlier stages that already write to it
  int64_t readers = 0;       // operations that read it, an operand more than once maybe
  int64_t in = -1;           // a value whose memory it takes over
};

// A row-wise operation. `a`, `b`, `c`: operand values; `y`: the result's number.
struct RowOperation {
  Operation kind;
  size_t a, b, c, y;
  Norm norm;
  const float* vector;
  float factor;
  Rotation rotation;
  const MatmulWork* product;  // set: only prepares the row for this matmul
  int64_t each;               // size of a norm: the row's, or a head's
  Activation activation;
  Hadamard hadamard;
};

// One of an attention's stages.
struct AttentionStage {
  const AttentionWork* work;
  int64_t number;
};

struct Stage {
  std::vector<RowOperation> rows;
  std::vector<const MatmulWork*> products;
  std::vector<AttentionStage> attentions;
};

// Runs a row-wise operation of one row.
inline void run_row(const RowOperation& o, const std::vector<Value>& values, int64_t row) {
  const int64_t size = values[o.a].size;
  const float* a = values[o.a].x + row * size;
  if (o.product) return o.product->prepare(a, row);
  float* y = values[o.y].y + row * size;
  if (o.kind == kNorm) {
    for (int64_t i = 0; i < size; i += o.each) rowwise_kernels().norm(a + i, o.each, o.norm, y + i);
    return;
  }
  if (o.kind == kRotate) {
    const int64_t angles = row * o.rotation.pairs;
    const float *cos = values[o.b].x + angles, *sin = values[o.c].x + angles;
    return rowwise_kernels().rotate(a, cos, sin, size, o.rotation, y);
  }
  if (o.kind == kHadamard) return rowwise_kernels().hadamard(a, size, o.hadamard, y);
  if (o.kind == kScale) return rowwise_kernels().scale(a, o.factor, size, y);
  if (o.kind == kActivate) return rowwise_kernels().activate(a, o.activation, size, y);
  if (o.kind == kMultiply)
    return rowwise_kernels().multiply(a, values[o.b].x + row * size, size, y);
  rowwise_kernels().add(a, o.kind == kAdd ? values[o.b].x + row * size : o.vector, size, y);
}

}  // namespace
}  // namespace jinfer
