// Attention's products and softmax in integers: scores of bytes, weights and values of 16 bits. An
// instruction has four and two times the products of one of floats, and sums are exact in any
// order.
//
// Scores are in units of log(2). A block's weights are relative to its largest, which is
// WEIGHT_UNIT if all values have one scale. Weights, and values, of a pair of keys share words.
#pragma once

#include "attention/attention_partials.h"
#include "attention/attention_products.h"

namespace jinfer {
namespace {

constexpr int INT8_ROWS = LANES;  // rows whose softmax is computed together
constexpr int VECTORS = BLOCK_KEYS / LANES;
constexpr int PAIRS = BLOCK_KEYS / 2;
constexpr int VALUE_BITS = 11;
// BLOCK_KEYS products of weights and values of up to 2^VALUE_BITS stay within 32 bits.
constexpr float WEIGHT_UNIT = 16383;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
constexpr float LOWEST = -1e30f;  // below any score, and finite

// sum += the products of unsigned and signed bytes, or of integers of 16 bits, in each lane. In
// assembly: GCC 12 copies the sums of the builtin functions from register to register.
inline void add_byte_products(__m512i& sum, __m512i bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));
}

inline void add_pair_products(__m512i& sum, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

inline Ints load_words(const void* from) {
  Ints x;
  memcpy(&x, from, sizeof x);
  return x;
}

inline void store_words(int32_t* to, Ints x) { memcpy(to, &x, sizeof x); }

// Magnitudes as integers of their bits, among which those of NaN are the largest.
inline Ints magnitude(Floats x) { return (Ints)x & 0x7fffffff; }
inline Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }

inline float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Four vectors of integers up to 255 as bytes, in turns four of each.
inline Ints as_bytes(const Floats* x) {
  const __m512i a = _mm512_cvtps_epi32(x[0]), b = _mm512_cvtps_epi32(x[1]),
                c = _mm512_cvtps_epi32(x[2]), d = _mm512_cvtps_epi32(x[3]);
  return (Ints)_mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
}

// x rounded to an integer of 16 bits in the lower half of each lane; and two of them in one.
inline Ints rounded(Floats x, Floats factor) {
  return (Ints)multiply_add(x, factor, broadcast(12582912.0f));  // 1.5 * 2^23
}

inline Ints joined(Ints low, Ints high) {
  return (Ints)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)(high << 16));
}

// 2^x for x <= 0, to 4e-6; NaN for NaN.
inline Floats power_of_2(Floats x) {
  const Floats n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), r = x - n;
  Floats p = multiply_add(broadcast(9.582852944731712e-3f), r, broadcast(5.5906426161527634e-2f));
  p = multiply_add(p, r, broadcast(0.24024099111557007f));
  p = multiply_add(p, r, broadcast(0.6931241750717163f));
  p = multiply_add(p, r, broadcast(1.0f));
  return _mm512_scalef_ps(p, n);
}

inline Floats larger_score(Floats a, Floats b) { return _mm512_max_ps(a, b); }

// Prefetches whole cache lines. Processors drop what exceeds their buffers, so it is to be spread
// over what is computed.
inline void prefetch_lines(const char* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// The first key of a pair; the second is LANES after it.
constexpr int first_of_pair(int i) { return i / LANES * 2 * LANES + i % LANES; }

// Queries of a tile as bytes.
struct Int8Queries {
  int words, groups;         // of a row; groups have offsets, and scales of keys, of their own
  int32_t *bytes, *offsets;  // [rows][words]; [rows][groups], as byte 128 means 0 in keys
  float *scales, *shifts;    // [rows]; shifts are added to a row's scores

  // Rounds row r, whose largest magnitude is `max_value`. from(d) has numbers d .. d + LANES.
  template <class F>
  void round(int64_t r, float max_value, float shift, const F& from) const {
    const Floats factor = broadcast(max_value > 1e-30f ? 127 / max_value : 0);
    int32_t* to = bytes + r * words;
    const int each = words / groups;
    for (int g = 0, w = 0; g < groups; ++g) {
      __m512i sum = _mm512_setzero_si512();
      for (; w < (g + 1) * each; w += 4) {
        const __m512i x = _mm512_cvtps_epi32(from(4 * w) * factor);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + w), _mm512_cvtepi32_epi8(x));
        sum = _mm512_add_epi32(sum, x);
      }
      // Without a sign: bytes that are not finite are arbitrary, and their sum may overflow.
      offsets[r * groups + g] = int32_t(-128u * uint32_t(_mm512_reduce_add_epi32(sum)));
    }
    scales[r] = max_value * (LOG2_E / 127), shifts[r] = shift * LOG2_E;
  }
};

// Scores of M rows with keys as columns [words][BLOCK_KEYS], and the largest of each row's lanes.
// `key_scales` [groups][BLOCK_KEYS]; null: all are 1, and there is one group. Of each word `ahead`
// bytes are prefetched from `later` on.
template <int M, bool scaled>
__attribute__((noinline)) void int8_scores(const Int8Queries& q, int row, const int32_t* keys,
                                           const float* key_scales, const char* later, int ahead,
                                           float* scores, Floats* max_value) {
  static_assert(NR == VECTORS, "a tile of sums is as wide as a block");
  const int groups = scaled ? q.groups : 1, each = q.words / groups;
  for (int g = 0; g < groups; ++g, keys += each * BLOCK_KEYS) {
    const int32_t* bytes = q.bytes + int64_t(row) * q.words + g * each;
    __m512i sum[M][NR];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int w = 0; w < NR; ++w)
        sum[m][w] = _mm512_set1_epi32(q.offsets[int64_t(row + m) * groups + g]);
    for (int d = 0; d < each; ++d, later += ahead) {
      prefetch_lines(later, ahead);
      __m512i k[NR];
#pragma GCC unroll 8
      for (int w = 0; w < NR; ++w) k[w] = (__m512i)load_words(keys + d * BLOCK_KEYS + w * LANES);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512i x = _mm512_set1_epi32(bytes[m * q.words + d]);
#pragma GCC unroll 8
        for (int w = 0; w < NR; ++w) add_byte_products(sum[m][w], k[w], x);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats scale = broadcast(q.scales[row + m]);
      Floats x[NR];
#pragma GCC unroll 8
      for (int w = 0; w < NR; ++w) {
        float* to = scores + m * BLOCK_KEYS + w * LANES;
        const Floats before = g ? load(to) : broadcast(q.shifts[row + m]);
        const float* own = key_scales + g * BLOCK_KEYS + w * LANES;
        x[w] = multiply_add((Floats)_mm512_cvtepi32_ps(sum[m][w]),
                            scaled ? scale * load(own) : scale, before);
        store(to, x[w]);
      }
      max_value[m] = larger_score(larger_score(x[0], x[1]), larger_score(x[2], x[3]));
    }
  }
}

// out[m] = out[m] * keep[m] + unit[m] * sum over pairs i of weights[m][i] * of(i, w), for W vectors
// of words of values.
template <int M, int W, class F>
inline void accumulate_pairs(const int32_t* weights, const F& of, const float* keep,
                             const float* unit, float* out, int64_t out_stride) {
  __m512i sum[M][W];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sum[m][w] = _mm512_setzero_si512();
  for (int i = 0; i < PAIRS; ++i) {
    __m512i v[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) v[w] = of(i, w);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i x = _mm512_set1_epi32(weights[m * (PAIRS) + i]);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) add_pair_products(sum[m][w], x, v[w]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) {
      float* to = out + m * out_stride + w * LANES;
      store(to, multiply_add((Floats)_mm512_cvtepi32_ps(sum[m][w]), broadcast(unit[m]),
                             load(to) * keep[m]));
    }
}

// For values as words.
template <int M, int W>
__attribute__((noinline)) void accumulate_words(const int32_t* weights, const int32_t* values,
                                                int64_t dim, const float* keep, const float* unit,
                                                float* out, int64_t out_stride) {
  accumulate_pairs<M, W>(
      weights, [&](int i, int w) { return (__m512i)load_words(values + i * dim + w * LANES); },
      keep, unit, out, out_stride);
}

// For values as stored, from number d on: they are rounded as they are used. As many bytes of the
// `next` block's values are prefetched.
template <int M, int W, class Values>
__attribute__((noinline)) void accumulate_stored(const int32_t* weights, const Values& values,
                                                 const char* next, int d, const float* keep,
                                                 const float* unit, float* out,
                                                 int64_t out_stride) {
  constexpr int READ = 2 * W * LANES * Values::BYTES_EACH;  // bytes of a pair
  const Values mine = values;
  next += d * int64_t(BLOCK_KEYS) * Values::BYTES_EACH;
  accumulate_pairs<M, W>(
      weights,
      [&](int i, int w) __attribute__((always_inline)) {
        if (w == 0) prefetch_lines(next + i * READ, READ);
        return mine.join(i, d + w * LANES);
      },
      keep, unit, out + d, out_stride);
}

// Calls f(W, d) for the numbers d of values: W vectors from each d on.
template <int WIDE, class F>
inline void for_vectors(int dim, const F& f) {
  int d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES) f(std::integral_constant<int, WIDE>{}, d);
  for (; d + 2 * LANES <= dim; d += 2 * LANES) f(std::integral_constant<int, 2>{}, d);
  for (; d < dim; d += LANES) f(std::integral_constant<int, 1>{}, d);
}

// How a block's weights are rounded: for each group of `dim` numbers of values, in units of
// 1 / factors[key], and what the products are multiplied by.
struct WeightScales {
  int groups, dim;
  float *factors, *units;  // [groups][BLOCK_KEYS], [groups]
};

// Softmax state of a tile's rows within a split.
struct Int8State {
  float* sums;  // rows of partial_floats(): totals per lane before the weighted sums
  int64_t stride;
  alignas(64) float highest[MAX_TILE_ROWS + LANES];

  // Turns scores of `rows` <= INT8_ROWS rows from `row` on, with largest lanes `max_value`, into
  // weights [groups][INT8_ROWS][PAIRS]. Sums before are to be multiplied by `keep`, the block's by
  // `units` [groups][LANES].
  void weigh(int row, int rows, const float* scores, Floats* max_value, const WeightScales& scales,
             int32_t* weights, float* keep, float* units) {
    alignas(64) float tops[LANES], portions[LANES];
    for (int m = rows; m < LANES; ++m) max_value[m] = Floats{};
    const Floats top = across<LANES>(max_value, larger_score), before = load(highest + row);
    const Floats now = larger_score(top, before), here = power_of_2(top - now);
    store(highest + row, now), store(tops, top), store(keep, power_of_2(before - now));
    store(portions, here);
    for (int g = 0; g < scales.groups; ++g) store(units + g * LANES, here * scales.units[g]);
    for (int m = 0; m < rows; ++m) {
      Floats w[VECTORS];
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i)
        w[i] = power_of_2(load(scores + m * BLOCK_KEYS + i * LANES) - broadcast(tops[m]));
      float* total = sums + (row + m) * stride;
      store(total, multiply_add((w[0] + w[1]) + (w[2] + w[3]), broadcast(portions[m]),
                                load(total) * keep[m]));
      for (int g = 0; g < scales.groups; ++g) {
        const float* factors = scales.factors + g * BLOCK_KEYS;
        int32_t* to = weights + (g * INT8_ROWS + m) * PAIRS;
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; i += 2)
          store_words(to + i / 2 * LANES,
                      joined(rounded(w[i], load(factors + i * LANES)),
                             rounded(w[i + 1], load(factors + (i + 1) * LANES))));
      }
    }
  }
};

}  // namespace
}  // namespace jinfer
