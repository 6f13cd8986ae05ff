// Floats of 16 bits, f16 and bf16, to and from float.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jinfer {
namespace {

// 16-bit numbers as stored.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float from_f16(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#elif defined(__aarch64__)
  __fp16 half;
  memcpy(&half, &bits, 2);
  return half;
#else
  uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
  float x;
  if (rest < 0x400) {  // zero and subnormal numbers
    x = rest * 0x1p-24f;
    uint32_t word;
    memcpy(&word, &x, 4);
    word |= sign;
    memcpy(&x, &word, 4);
    return x;
  }
  uint32_t word = sign | ((rest << 13) + (rest >= 0x7c00 ? 0x70000000 : 0x38000000));
  memcpy(&x, &word, 4);
  return x;
#endif
}

inline uint16_t to_f16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  const __fp16 half = x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
#else
  uint32_t word;
  memcpy(&word, &x, 4);
  uint16_t sign = uint16_t(word >> 16) & 0x8000;
  word &= 0x7fffffff;
  if (word > 0x7f800000) return sign | 0x7e00;
  if (word >= 0x477ff000) return sign | 0x7c00;
  if (word < 0x38800000) {  // subnormal: the sum rounds in units of 2^-24
    float magnitude;
    memcpy(&magnitude, &word, 4);
    magnitude += 0.5f;
    memcpy(&word, &magnitude, 4);
    return sign | uint16_t(word - 0x3f000000);
  }
  word += 0xfff + ((word >> 13) & 1);
  return sign | uint16_t((word - 0x38000000) >> 13);
#endif
}

inline uint16_t to_bf16(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return uint16_t(word >> 16) | 0x40;
  return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

}  // namespace
}  // namespace jinfer
