// Random numbers of a request's seed, as in jinfer/sampling/rng.py: Threefry-2x32 (Salmon et al.,
// 2011, "Parallel random numbers: as easy as 1, 2, 3") on words or vectors of words.
#pragma once

#include "simd/elementary.h"

namespace jinfer {
namespace {

template <class W>
inline W rotated(W x, int by) {
  return (x << by) | (x >> (32 - by));
}

// Four rounds and the key injection after them.
template <class W>
inline void rounds(W* x, const int* by, W k0, W k1, uint32_t number) {
  for (int i = 0; i < 4; ++i) {
    x[0] += x[1];
    x[1] = rotated(x[1], by[i]) ^ x[0];
  }
  x[0] += k0;
  x[1] += k1 + number;
}

// Encrypts both words of x.
template <class W>
inline void threefry(const uint32_t* key, W* x) {
  constexpr int even[4] = {13, 15, 26, 6}, odd[4] = {17, 29, 16, 24};
  const W k0 = W{} + key[0], k1 = W{} + key[1], k2 = k0 ^ k1 ^ 0x1BD11BDAu;
  x[0] += k0;
  x[1] += k1;
  rounds(x, even, k1, k2, 1);
  rounds(x, odd, k2, k0, 2);
  rounds(x, even, k0, k1, 3);
  rounds(x, odd, k1, k2, 4);
  rounds(x, even, k2, k0, 5);
}

// Stages with random decisions, numbered as in rng.py.
enum class RandomStream : uint32_t { token = 0, xtc = 1, random_fsd = 2 };

// Uniform in [0, 1) for a stage's decision, after `drawn` tokens.
inline float uniform(const uint32_t* key, RandomStream stream, int32_t drawn) {
  uint32_t x[2] = {static_cast<uint32_t>(stream), static_cast<uint32_t>(drawn)};
  threefry(key, x);
  return static_cast<float>(x[0] >> 8) * 0x1p-24f;
}

// Gumbel noise of tokens; `key` is the request's, folded with the position of the next token.
inline Floats noise(const uint32_t* key, Words tokens) {
  Words x[2] = {Words{}, tokens};
  threefry(key, x);
  const Words bits = ((x[0] ^ x[1]) >> 9) | 0x3f800000u;
  const Floats uniform = larger((Floats)bits - 1.0f, broadcast(1.17549435e-38f));
  return -logarithm(-logarithm(uniform));
}

}  // namespace
}  // namespace jinfer
