// Portable vectors of 8 lanes of 4 bytes in plain C++, with the interface of vector_avx512.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Vector {
  static constexpr int L = 8;
  static constexpr int kMaxRows = 4;  // of activations at a time
  static constexpr int kPanelRows = kMaxRows;
  static constexpr int kGroups = 1;  // row groups of a panel at a time
  static constexpr bool kNarrowCodes = false;
  static constexpr bool kByteShifts = false;
  static constexpr bool kSplitsSevenBits =
      false;  // split_pairs() takes no notice of the eighth bit
  static constexpr int kMaxPairRows = 0;
  static constexpr bool kPairs = false;     // there is no scales_of_pair()
  static constexpr bool kRepeated = false;  // there is no load_repeated()
  static constexpr bool kTwoLevel = false;  // there are no load_int8() and broadcast_f16()
  typedef uint32_t I __attribute__((vector_size(4 * L)));
  typedef int32_t Signed __attribute__((vector_size(4 * L)));
  typedef float F __attribute__((vector_size(4 * L)));

  template <class T>
  static T copy(const void* p) {
    T out;
    std::memcpy(&out, p, sizeof out);
    return out;
  }
  static I load(const void* p) { return copy<I>(p); }
  static void store(void* p, I v) { std::memcpy(p, &v, sizeof v); }
  static F load_f(const float* p) { return copy<F>(p); }
  static void store_f(float* p, F v) { std::memcpy(p, &v, sizeof v); }
  static I zero() { return I{}; }
  static F zero_f() { return F{}; }
  static F set_f(float v) { return F{} + v; }

  template <int g>
  static I repeat(const void* p) {
    uint32_t all[L];
    for (int i = 0; i < L; i += g) std::memcpy(all + i, p, 4 * g);
    return load(all);
  }
  template <int g>
  static F repeat_f(const void* p) {
    return reinterpret_cast<F>(repeat<g>(p));
  }

  template <int n>
  static I shift_right(I a) {
    return a >> n;
  }
  template <int n>
  static I shift_left(I a) {
    return a << n;
  }
  static I bit_and(I a, uint32_t m) { return a & m; }
  static I bit_or(I a, I b) { return a | b; }

  static constexpr int dot_class(int) { return 255; }
  template <int max_value, bool minus, int steps>
  static void dot(I& a, I&, I codes, I x, int) {
    const Signed q = reinterpret_cast<Signed>(codes), y = reinterpret_cast<Signed>(x);
    Signed sum = reinterpret_cast<Signed>(a) + (q & 255) * (y << 24 >> 24);
    sum += (q >> 8 & 255) * (y << 16 >> 24);
    sum += (q >> 16 & 255) * (y << 8 >> 24);
    a = reinterpret_cast<I>(sum + (q >> 24 & 255) * (y >> 24));
  }
  static void dot_int16(I& a, I codes, I x) {
    const Signed q = reinterpret_cast<Signed>(codes), y = reinterpret_cast<Signed>(x);
    a += reinterpret_cast<I>((q << 16 >> 16) * (y << 16 >> 16) + (q >> 16) * (y >> 16));
  }
  static I add(I a, I b) { return a + b; }
  static F to_float(I a) { return __builtin_convertvector(reinterpret_cast<Signed>(a), F); }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }

  static void split_pairs(I v, I& x, I& y) {
    uint8_t codes[4 * L], quotient[4 * L], rest[4 * L];
    std::memcpy(codes, &v, sizeof codes);
    for (int i = 0; i < 4 * L; ++i) {
      quotient[i] = codes[i] * 187 >> 11;  // codes[i] / 11 for codes below 128
      rest[i] = codes[i] - 11 * quotient[i];
    }
    x = load(quotient);
    y = load(rest);
  }
  static I lookup(const uint8_t* table, I v) {
    uint8_t codes[4 * L];
    std::memcpy(codes, &v, sizeof codes);
    for (uint8_t& code : codes) code = table[code & 15];
    return load(codes);
  }

  template <int g>
  static void sum_runs(F v, float* out) {
    float sums[L];  // neighbours first, as where there are instructions for it
    store_f(sums, v);
    for (int half = 1; half < g; half *= 2)
      for (int i = 0; i < L; i += 2 * half) sums[i] += sums[i + half];
    for (int run = 0; run < L / g; ++run) out[run] = sums[run * g];
  }

  static bool gather(const void*, bool, int, const uint16_t*, bool, F&, F&) { return false; }

  static uint32_t magnitude(const float* x) {
    uint32_t max_value = 0;
    for (int i = 0; i < 32; ++i) {
      const uint32_t bits = copy<uint32_t>(x + i) & 0x7fffffffu;
      max_value = bits > max_value ? bits : max_value;
    }
    return max_value;
  }
  static I rounded(F v) {
    int32_t values[L];
    for (int i = 0; i < L; ++i) values[i] = static_cast<int32_t>(std::nearbyintf(v[i]));
    return load(values);
  }
  static void to_int16(const I* v, int16_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<int16_t>(v[i / L][i % L]);
  }
  static void to_int8(const I* v, int8_t* codes, int32_t* sums) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; ++i) {
      codes[i] = static_cast<int8_t>(v[i / L][i % L]);
      sums[i / 16] += codes[i];
    }
  }
};

}  // namespace
