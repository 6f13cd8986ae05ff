// A feed-forward's gate, for the instructions that the including file is compiled for.
#pragma once

#include "activation.h"
#include "lanes.h"

namespace jinfer {
namespace {

// 1 + e^-x, which a sigmoid is the inverse of; a NaN stays one.
inline Floats one_and_exponential(Floats x) {
  return 1.0f + exponential(-x > 88.0f ? all(88.0f) : -x);
}

// y[n] = f(y[n]) * up[n]. Every element goes through vectors, the last ones too: which of them a
// number is among does not change its bits.
template <class F>
inline void gate_by(F f, int64_t count, const float* up, float* y) {
  int64_t n = 0;
  for (; n + LANES <= count; n += LANES) store(y + n, f(load(y + n)) * load(up + n));
  if (n == count) return;
  const Floats rest = f(load_some(y + n, count - n)) * load_some(up + n, count - n);
  memcpy(y + n, &rest, 4 * (count - n));
}

// y[n] = activation(y[n]) * up[n].
inline void gate(Activation activation, int64_t count, const float* up, float* y) {
  if (activation == Activation::silu) {
    gate_by([](Floats x) { return x / one_and_exponential(x); }, count, up, y);
  } else if (activation == Activation::gelu_tanh) {
    // 0.5 (1 + tanh(z)) = 1 / (1 + e^(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
    gate_by(
        [](Floats x) {
          return x / one_and_exponential(1.5957691216f * (x + 0.044715f * x * x * x));
        },
        count, up, y);
  } else {
    gate_by([](Floats x) { return x < 0.0f ? Floats{} : x; }, count, up, y);
  }
}

}  // namespace
}  // namespace jinfer
