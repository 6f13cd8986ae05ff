// Elementary functions of vectors: exponential, logarithm, hyperbolic tangent.
#pragma once

#include "simd/simd.h"

namespace jinfer {
namespace {

// e^x for x up to 88, to 2 units in the last place; 0 below -87.
inline Floats exponential(Floats x) {
#if defined(__AVX512F__)
  __m512 n = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
  Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
#else
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats n = (x * 1.44269504f + magic) - magic;
  Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
#endif
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return _mm512_scalef_ps(x < -87.0f ? Floats{} : p, n);
#else
  Ints exponent = x < -87.0f ? Ints{} : __builtin_convertvector(n, Ints);
  Floats power = (Floats)((Ints)broadcast(1.0f) + (exponent << 23));
  return x < -87.0f ? Floats{} : p * power;
#endif
}

// The natural logarithm of a normal number above 0, to 2 units in the last place.
inline Floats logarithm(Floats x) {
  const Ints exponent = ((Ints)x - 0x3f3504f3) >> 23;  // what is left is from sqrt(1/2) to sqrt(2)
  const Floats n = __builtin_convertvector(exponent, Floats);
  const Floats r = (Floats)((Ints)x - (exponent << 23)) - 1.0f;
  Floats p = broadcast(7.0376836292e-2f);
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  const Floats square = r * r;
  return (r + (p * r * square - n * 2.12194440e-4f - 0.5f * square)) + n * 0.693359375f;
}

inline Floats hyperbolic_tangent(Floats x) {
  x = larger(broadcast(-15.0f), -larger(broadcast(-15.0f), -x));
  return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}

}  // namespace
}  // namespace jinfer
