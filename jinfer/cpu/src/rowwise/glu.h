// Activation functions and GLU, compiled once per instruction set.
#pragma once

#include <cmath>

#include "common/activation.h"
#include "simd/elementary.h"

namespace jinfer {
namespace {

// 1 + e^-x, the inverse of a sigmoid; keeps NaN.
inline Floats one_plus_exp_minus(Floats x) {
  return 1.0f + exponential(-x > 88.0f ? broadcast(88.0f) : -x);
}

// erfc(x) for x >= 0, to 2 units in the last place of float32 where it matters: Chebyshev's
// approximation of "Numerical Recipes", section 6.2.
inline Floats erfc_of_positive(Floats x) {
  const Floats t = 1.0f / (1.0f + 0.5f * x);
  Floats p = broadcast(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * exponential(p - x * x);
}

inline Floats sigmoid(Floats x) { return 1.0f / one_plus_exp_minus(x); }

// e^x, infinite where float32 cannot hold it.
inline Floats exp_of_any(Floats x) { return exponential(x > 89.0f ? broadcast(89.0f) : x); }

// Kahan's log(1 + x): what rounding 1 + x takes is given back.
inline Floats log1p(Floats x) {
  const Floats u = 1.0f + x, rounded = u - 1.0f;
  const Floats y = rounded == 0.0f ? x : logarithm(u) * (x / rounded);
  const Floats edge = u == 0.0f ? broadcast(-INFINITY) : u > 0.0f ? x : broadcast(NAN);
  return u > 0.0f && u < INFINITY ? y : edge;
}

// Kahan's e^x - 1, likewise.
inline Floats expm1(Floats x) {
  const Floats u = exp_of_any(x), rounded = u - 1.0f;
  const Floats y = rounded == 0.0f ? x : rounded * (x / logarithm(u));
  return u > 1e-8f && u < INFINITY ? y : rounded;
}

inline Floats tanh(Floats x) {
  const Floats least = x < -15.0f ? broadcast(-15.0f) : x;
  const Floats e = expm1(2.0f * (least > 15.0f ? broadcast(15.0f) : least));
  return e / (e + 2.0f);
}

// log(1 + e^x)
inline Floats softplus(Floats x) {
  return (x > 0.0f ? x : Floats{}) + log1p(exponential(x < 0.0f ? x : -x));
}

inline Floats silu(Floats x) { return x / one_plus_exp_minus(x); }

// 0.5 (1 + tanh(z)) = 1 / (1 + e^(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
inline Floats gelu_tanh(Floats x) {
  return x / one_plus_exp_minus(1.5957691216f * (x + 0.044715f * x * x * x));
}

// x times the normal distribution's CDF (arXiv 1606.08415).
inline Floats gelu(Floats x) {
  const Floats above = 0.5f * erfc_of_positive((x < 0.0f ? -x : x) * 0.70710678f);
  return x * (x < 0.0f ? above : 1.0f - above);
}

inline Floats quick_gelu(Floats x) { return x / one_plus_exp_minus(1.702f * x); }

inline Floats relu(Floats x) { return x < 0.0f ? Floats{} : x; }

// Calls f with the vector form of an activation.
template <class F>
inline void dispatch_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::silu: return f([](Floats x) { return silu(x); });
    case Activation::gelu_tanh: return f([](Floats x) { return gelu_tanh(x); });
    case Activation::relu: return f([](Floats x) { return relu(x); });
    case Activation::gelu: return f([](Floats x) { return gelu(x); });
    case Activation::quick_gelu: return f([](Floats x) { return quick_gelu(x); });
    case Activation::relu2: return f([](Floats x) { return relu(x) * relu(x); });
    case Activation::sigmoid: return f([](Floats x) { return sigmoid(x); });
    case Activation::softplus: return f([](Floats x) { return softplus(x); });
    case Activation::exp: return f([](Floats x) { return exp_of_any(x); });
    case Activation::expm1: return f([](Floats x) { return expm1(x); });
    case Activation::log1p: return f([](Floats x) { return log1p(x); });
    case Activation::tanh: return f([](Floats x) { return tanh(x); });
    case Activation::none: break;
  }
}

// y[n] = activation(y[n]) * up[n]. The remainder goes through vectors too, so that bits do not
// depend on an element's position.
inline void glu(Activation activation, int64_t count, const float* up, float* y) {
  dispatch_activation(activation, [=](auto f) {
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) store(y + n, f(load(y + n)) * load(up + n));
    if (n == count) return;
    const Floats rest = f(load_partial(y + n, count - n)) * load_partial(up + n, count - n);
    memcpy(y + n, &rest, 4 * (count - n));
  });
}

}  // namespace
}  // namespace jinfer
