// Old keys and values that are stored as codes of 8 bits: their integers are what is stored.
#pragma once

#include "attention/attention_int8.h"

namespace jinfer {
namespace {

// Keys and values of a split, as NumberBlocks has them. Blocks of 32 numbers have scales.
struct CodeBlocks {
  static constexpr bool scaled = true;
  const CachedVectors &keys, &values;
  WeightScales scales;
  int32_t* words;
  const uint8_t* stored = nullptr;
  int64_t ahead = 0;

  static int words_of(int dim) { return (dim + 63) / 64 * LANES; }
  static int groups_of(int dim) { return words_of(dim) / 8; }
  static int value_groups_of(int dim) { return dim / 32; }

  template <class Reserve>
  CodeBlocks(const Call& call, const Reserve& reserve) : keys(call.keys), values(call.values) {
    const int dim = values.padded(), groups = value_groups_of(dim);
    scales = {groups, 32, reserve(groups * BLOCK_KEYS), reserve(groups)};
    words = reinterpret_cast<int32_t*>(reserve(PAIRS * int64_t(dim)));
  }

  // Scales of block g of numbers of LANES vectors.
  static Floats scales_of(const CachedVectors& cache, int64_t vector, int g) {
    const int numbers = cache.format.numbers(cache.dim);
    const uint16_t* from = cache.numbers + vector * numbers + g;
    if (numbers == 2) {
      const __m512i both = _mm512_loadu_si512(from - g);
      return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(g ? _mm512_srli_epi32(both, 16) : both));
    }
    Float16 x[LANES];
    for (int i = 0; i < LANES; ++i) x[i].bits = from[i * int64_t(numbers)];
    return load(x);
  }

  static void prefetch_numbers(const CachedVectors& cache, int64_t vector) {
    const int numbers = cache.format.numbers(cache.dim);
    const uint16_t* from = cache.numbers + vector * numbers;
    for (int i = 0; i < BLOCK_KEYS * numbers; i += 32) __builtin_prefetch(from + i, 0, 2);
  }

  void round_queries(const float* q, int rows, const int64_t*, int, const Int8Queries& to) const {
    const int dim = keys.padded();
    for (int64_t r = 0; r < rows; ++r, q += dim) {
      Ints most = {};
      for (int d = 0; d < dim; d += LANES) most = larger(most, magnitude(load(q + d)));
      const float top = float_of(_mm512_reduce_max_epi32((__m512i)most));
      to.round(r, top, 0, [&](int d) { return d < dim ? load(q + d) : Floats{}; });
    }
  }

  void read_keys(int64_t block, int64_t later, int32_t* columns, float* key_scales) const {
    const int each = keys.format.words(keys.dim), groups = each / 8;
    const uint32_t* from = static_cast<const uint32_t*>(keys.data) + block * each;
    const int64_t away = (later - block) * each;
    prefetch_numbers(keys, later);
    for (int j = 0; j < BLOCK_KEYS; j += LANES)
      for (int g = 0; g < groups; ++g) {
        const uint32_t* at[LANES];
        for (int i = 0; i < LANES; ++i) {
          at[i] = from + int64_t(j + i) * each + 8 * g;
          if (g % 2 == 0) __builtin_prefetch(at[i] + away, 0, 2);
        }
        Words turned[8];
        transpose_words(at, 8, turned);
#pragma GCC unroll 8
        for (int w = 0; w < 8; ++w)
          store_words(columns + (8 * g + w) * BLOCK_KEYS + j, (Ints)turned[w]);
        store(key_scales + g * BLOCK_KEYS + j, scales_of(keys, block + j, g));
      }
  }

  void read_values(int64_t block, int64_t next, bool few) {
    const int dim = values.padded(), each = values.format.words(values.dim);
    stored = reinterpret_cast<const uint8_t*>(static_cast<const uint32_t*>(values.data) +
                                              block * each);
    ahead = (next - block) * 4 * each;
    prefetch_numbers(values, next);
    for (int g = 0; g < scales.groups; ++g) {
      float* factors = scales.factors + g * BLOCK_KEYS;
      Ints most = {};
      Floats x[VECTORS];
      for (int i = 0; i < VECTORS; ++i) {
        x[i] = scales_of(values, block + i * LANES, g);
        most = larger(most, magnitude(x[i]));
      }
      const float top = float_of(_mm512_reduce_max_epi32((__m512i)most));
      const Floats factor = broadcast(top > 1e-30f ? WEIGHT_UNIT / top : 0);
      for (int i = 0; i < VECTORS; ++i) store(factors + i * LANES, x[i] * factor);
      scales.units[g] = top * (1 / WEIGHT_UNIT);
    }
    if (few) return;
    for (int i = 0; i < PAIRS; ++i)
      for (int d = 0; d < dim; d += LANES)
        store_words(words + i * int64_t(dim) + d, (Ints)join(i, d));
  }

  __m512i join(int pair, int d) const {
    const int dim = values.padded();
    const uint8_t *a = stored + first_of_pair(pair) * int64_t(dim) + d, *b = a + LANES * dim;
    if (d % 64 == 0) {
      __builtin_prefetch(a + ahead, 0, 2);
      __builtin_prefetch(b + ahead, 0, 2);
    }
    const auto wide = [](const uint8_t* x) {
      return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    };
    const __m512i both = _mm512_or_si512(wide(a), _mm512_slli_epi32(wide(b), 16));
    return _mm512_sub_epi16(both, _mm512_set1_epi16(128));
  }
};

}  // namespace
}  // namespace jinfer
