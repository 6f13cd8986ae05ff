// Low-rank terms (LoRA): the interface between driver and kernels.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "dense/dense.h"

namespace jinfer {

struct LoraKernels {
  int64_t tile;  // outputs that are best computed together
  // to[row][n] = y[row][n] + x[i] . b[..][n] for outputs begin .. end - 1 of row = rows[i], i <
  // count. x: [count, rank]; y and to: [.., outputs]; b: [rank, outputs], transposed. `next`: the
  // matrix whose same outputs are computed next, or null.
  void (*add)(const DenseMatrix& b, const void* next, const float* x, const int64_t* rows,
              int64_t count, int64_t begin, int64_t end, const float* y, float* to);
};

const LoraKernels& lora_portable();
const LoraKernels& lora_avx2();
const LoraKernels& lora_avx512();
inline const LoraKernels& lora_kernels() { return JINFER_DISPATCH(lora); }

}  // namespace jinfer
