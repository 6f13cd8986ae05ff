// Activation functions by number; glu.h computes them.
#pragma once

#include <cstdint>

namespace jinfer {

// Indices of ACTIVATIONS in matmul_call.py. GLU has those up to `relu`.
enum class Activation : int {
  none = 0,
  silu = 1,
  gelu_tanh = 2,
  relu = 3,
  gelu = 4,
  quick_gelu = 5,
  relu2 = 6,
  sigmoid = 7,
  softplus = 8,
  exp = 9,
  expm1 = 10,
  log1p = 11,
  tanh = 12,
};

inline bool is_activation(int64_t number) {
  return number > 0 && number <= static_cast<int64_t>(Activation::tanh);
}

}  // namespace jinfer
