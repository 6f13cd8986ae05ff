// SIMD vectors of floats, as wide as the target's, through the compiler's vector extensions. All
// names have internal linkage: a name must not denote different instructions in one library.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "simd/float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jinfer {
namespace {

// LANES: floats of a vector. MR rows by NR vectors: tile of a matmul micro-kernel whose sums stay
// in REGISTERS registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, NR = 4, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, NR = 2, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, NR = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, NR = 2, REGISTERS = 16;
#endif
constexpr int MR = 6;

// Calls f(std::integral_constant<int, n>) for 1 <= n <= MR.
template <class F>
void dispatch_count(int64_t n, F f) {
  static_assert(MR == 6, "the cases below are all there are");
  switch (n) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
  }
}

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats load(const float* from) {
  Floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }

// Forces x into a register: compilers would load it again for each use.
inline Floats in_register(Floats x) {
#if defined(__AVX2__)
  asm("" : "+v"(x));
#endif
  return x;
}

inline Floats broadcast(float x) { return x - Floats{}; }

// Broadcasts a number loaded at this point: on ARM, compilers load those of all rows first and run
// out of registers for the tile's sums.
inline Floats broadcast_in_order(float x) {
#if defined(__aarch64__)
  asm volatile("" : "+w"(x));
#endif
  return broadcast(x);
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c, with a fused instruction wherever there is one.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Lanes of the concatenation of a and b.
template <int... lane>
inline Floats shuffled(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lane...);
#else
  return __builtin_shuffle(a, b, Ints{lane...});
#endif
}

template <int half, bool upper, int... lane>
inline Floats half_of(Floats a, Floats b, std::integer_sequence<int, lane...>) {
  return shuffled<((lane & half) ? LANES + (upper ? lane : lane - half)
                                 : (upper ? lane + half : lane))...>(a, b);
}

// In groups of 2 * half lanes: the lower halves of a and b side by side, or the upper ones.
template <int half, bool upper>
inline Floats halves(Floats a, Floats b) {
  return half_of<half, upper>(a, b, std::make_integer_sequence<int, LANES>{});
}

// Lane i of the result is the sum of the lanes of x[i].
template <int half = LANES / 2>
inline Floats horizontal_sums(Floats* x) {
  if constexpr (half == 0) {
    return x[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i)
      x[i] = halves<half, false>(x[i], x[i + half]) + halves<half, true>(x[i], x[i + half]);
    return horizontal_sums<half / 2>(x);
  }
}

// Lane i of x[j] becomes lane j of x[i], in squares of 2 * half lanes and as many of the vectors.
template <int half = LANES / 2, int vectors = LANES>
inline void transpose(Floats* x) {
  if constexpr (half > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < vectors; ++i) {
      if (i & half) continue;
      Floats lower = halves<half, false>(x[i], x[i + half]);
      x[i + half] = halves<half, true>(x[i], x[i + half]);
      x[i] = lower;
    }
    transpose<half / 2, vectors>(x);
  }
}

template <int apart, int... lane>
inline Floats swapped(Floats x, std::integer_sequence<int, lane...>) {
  return shuffled<(lane ^ apart)...>(x, x);
}

// The maximum over lanes, in every lane.
template <int apart = LANES / 2>
inline Floats max_lane(Floats x) {
  if constexpr (apart == 0) {
    return x;
  } else {
    x = larger(x, swapped<apart>(x, std::make_integer_sequence<int, LANES>{}));
    return max_lane<apart / 2>(x);
  }
}

inline float sum_lanes(Floats x) {
  float sum = 0;
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}

// Reduces each of R vectors by f, R a power of 2: the result of x[r] is in lane r * LANES / R and
// those up to the next.
template <int R, int half = LANES / 2, class F>
inline Floats across(Floats* x, F f) {
  if constexpr (half == 0) {
    return x[0];
  } else if constexpr (R == 1) {
    x[0] = f(x[0], swapped<half>(x[0], std::make_integer_sequence<int, LANES>{}));
    return across<1, half / 2>(x, f);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < R / 2; ++i)
      x[i] = f(halves<half, false>(x[i], x[i + R / 2]), halves<half, true>(x[i], x[i + R / 2]));
    return across<R / 2, half / 2>(x, f);
  }
}

// 16-bit patterns, zero-extended into 32-bit lanes.
inline Ints load_bits(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  return (Ints)vmovl_u16(vld1_u16(static_cast<const uint16_t*>(from)));
#else
  typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
  Shorts x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, Ints);
#endif
}

inline Floats load(const BFloat16* from) { return (Floats)(load_bits(from) << 16); }

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  const uint16x4_t bits = vld1_u16(reinterpret_cast<const uint16_t*>(from));
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(bits));
#else
  const Ints bits = load_bits(from), sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
  const Ints normal = (rest << 13) + (rest >= 0x7c00 ? Ints{} + 0x70000000 : Ints{} + 0x38000000);
  const Floats small = __builtin_convertvector(rest, Floats) * 0x1p-24f;
  return (Floats)(sign | (rest < 0x400 ? (Ints)small : normal));
#endif
}

inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Floats);
#endif
}

// Loads `count` < LANES numbers, zero-padded.
template <class T>
inline Floats load_partial(const T* from, int64_t count) {
  T some[LANES] = {};
  memcpy(some, from, count * sizeof(T));
  return load(some);
}

// Loads a vector of which `left` numbers are there, or fewer than none, zero-padded.
inline Floats load_padded(const float* from, int64_t left) {
  return left >= LANES ? load(from) : left > 0 ? load_partial(from, left) : Floats{};
}

// The lower halves of the LANES numbers at a and at b side by side, and the upper ones.
template <class T>
inline void load_halves(const T* a, const T* b, Floats* lower, Floats* upper) {
  const Floats x = load(a), y = load(b);
  *lower = halves<LANES / 2, false>(x, y);
  *upper = halves<LANES / 2, true>(x, y);
}

#if defined(__AVX512F__)
inline Floats side_by_side(__m256 a, __m256 b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
}

inline void load_halves(const float* a, const float* b, Floats* lower, Floats* upper) {
  *lower = side_by_side(_mm256_loadu_ps(a), _mm256_loadu_ps(b));
  *upper = side_by_side(_mm256_loadu_ps(a + 8), _mm256_loadu_ps(b + 8));
}
#endif

// Transposes LANES numbers at `at` of LANES vectors: x[i] has number i of each.
template <class T>
inline void load_transposed(const T* const* from, int64_t at, Floats* x) {
  constexpr int half = LANES / 2;
#pragma GCC unroll 8
  for (int i = 0; i < half; ++i)
    load_halves(from[i] + at, from[i + half] + at, x + i, x + i + half);
  transpose<half / 2>(x);
}

// Words of 32 bits in lanes.
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// Transposes the first `count` <= 8 words of LANES vectors: to[i] has word i of each.
inline void transpose_words(const uint32_t* const* from, int count, Words* to) {
#if defined(__AVX2__)
  const __m256i first =
      _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  auto load = [&](const uint32_t* x) {
    const float* words = reinterpret_cast<const float*>(x);
    return count == 8 ? _mm256_loadu_ps(words) : _mm256_maskload_ps(words, first);
  };
  Floats x[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#if defined(__AVX512F__)
    x[i] = side_by_side(load(from[i]), load(from[i + 8]));
#else
    x[i] = load(from[i]);
#endif
  }
  transpose<4, 8>(x);
  for (int i = 0; i < count; ++i) to[i] = (Words)x[i];
#else
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    Floats x[LANES];
    for (int lane = 0; lane < LANES; ++lane) memcpy(&x[lane], from[lane] + i, sizeof x[lane]);
    transpose(x);
    for (int j = 0; j < LANES; ++j) to[i + j] = (Words)x[j];
  }
  for (; i < count; ++i)
    for (int lane = 0; lane < LANES; ++lane) to[i][lane] = from[lane][i];
#endif
}

}  // namespace
}  // namespace jinfer
