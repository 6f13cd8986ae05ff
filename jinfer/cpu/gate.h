// Activation functions of feed-forwards with a gate, for the instructions that the including file
// is compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace jinfer {

// The numbers are those of ACTIVATIONS in linear.py.
enum class Activation : int { none = 0, silu = 1, gelu_tanh = 2, relu = 3 };

namespace {

// e^x to 2 units of the last place; written so that compilers make vectors of it.
inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;  // a NaN fails both
  const float n = std::nearbyintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, 4);
  return p * scale;
}

// y[n] = activation(y[n]) * up[n].
inline void gate(Activation activation, int64_t count, const float* up, float* y) {
  if (activation == Activation::silu) {
    for (int64_t n = 0; n < count; ++n) y[n] = y[n] / (1.0f + exp_of(-y[n])) * up[n];
  } else if (activation == Activation::gelu_tanh) {
    for (int64_t n = 0; n < count; ++n) {
      // 0.5 (1 + tanh(z)) = 1 / (1 + e^(-2 z))
      const float z = 0.7978845608f * (y[n] + 0.044715f * y[n] * y[n] * y[n]);
      y[n] = y[n] / (1.0f + exp_of(-2.0f * z)) * up[n];
    }
  } else {
    for (int64_t n = 0; n < count; ++n) y[n] = (y[n] < 0.0f ? 0.0f : y[n]) * up[n];
  }
}

}  // namespace
}  // namespace jinfer
