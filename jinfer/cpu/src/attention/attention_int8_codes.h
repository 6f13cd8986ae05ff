// Old keys and values that are stored as codes of 8 bits: their integers are what is stored.
#pragma once

#include "attention/attention_int8.h"

namespace jinfer {
namespace {

// A block's values.
struct CodeValues {
  static constexpr int BYTES_EACH = 1;
  const uint8_t* stored;
  int dim;

  // Numbers d .. d + LANES of the values of a pair of keys.
  __m512i join(int pair, int d) const {
    const uint8_t *a = stored + first_of_pair(pair) * int64_t(dim) + d, *b = a + LANES * dim;
    const auto wide = [](const uint8_t* x) {
      return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    };
    const __m512i both = _mm512_or_si512(wide(a), _mm512_slli_epi32(wide(b), 16));
    return _mm512_sub_epi16(both, _mm512_set1_epi16(128));
  }
};

// Keys and values of a split, as NumberBlocks has them. Blocks of 32 numbers have scales.
struct CodeBlocks {
  using Values = CodeValues;
  static constexpr bool scaled = true, cached = false;
  const CachedVectors &keys, &values;
  WeightScales scales;

  static int words_of(int dim) { return dim / 4; }
  static int groups_of(int dim) { return dim / 32; }
  static int value_groups_of(int dim) { return dim / 32; }

  template <class Reserve>
  CodeBlocks(const Call& call, const Reserve& reserve) : keys(call.keys), values(call.values) {
    const int dim = values.padded(), groups = value_groups_of(dim);
    scales = {groups, 32, reserve(groups * BLOCK_KEYS), reserve(groups)};
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

  void round_queries(const float* q, int rows, const int64_t*, int, const Int8Queries& to) const {
    const int dim = keys.padded();
    for (int64_t r = 0; r < rows; ++r, q += dim) {
      Ints max_value = {};
      for (int d = 0; d < dim; d += LANES) max_value = larger(max_value, magnitude(load(q + d)));
      const float top = float_of(_mm512_reduce_max_epi32((__m512i)max_value));
      to.round(r, top, 0, [&](int d) { return d < dim ? load(q + d) : Floats{}; });
    }
  }

  const int32_t* read_keys(int64_t block, const char* later, int ahead, int32_t* columns,
                           float* key_scales) const {
    const int each = keys.format.words(keys.dim), groups = each / 8;
    const uint32_t* from = static_cast<const uint32_t*>(keys.data) + block * each;
    for (int j = 0; j < BLOCK_KEYS; j += LANES)
      for (int g = 0; g < groups; ++g, later += 2 * ahead) {
        prefetch_lines(later, 2 * ahead);  // for eight words of a quarter of the keys
        const uint32_t* at[LANES];
        for (int i = 0; i < LANES; ++i) at[i] = from + int64_t(j + i) * each + 8 * g;
        Words turned[8];
        transpose_words(at, 8, turned);
#pragma GCC unroll 8
        for (int w = 0; w < 8; ++w)
          store_words(columns + (8 * g + w) * BLOCK_KEYS + j, (Ints)turned[w]);
        store(key_scales + g * BLOCK_KEYS + j, scales_of(keys, block + j, g));
      }
    return columns;
  }

  Values read_values(int64_t block) const {
    const int each = values.format.words(values.dim);
    for (int g = 0; g < scales.groups; ++g) {
      float* factors = scales.factors + g * BLOCK_KEYS;
      Ints max_value = {};
      Floats x[VECTORS];
      for (int i = 0; i < VECTORS; ++i) {
        x[i] = scales_of(values, block + i * LANES, g);
        max_value = larger(max_value, magnitude(x[i]));
      }
      const float top = float_of(_mm512_reduce_max_epi32((__m512i)max_value));
      const Floats factor = broadcast(top > 1e-30f ? WEIGHT_UNIT / top : 0);
      for (int i = 0; i < VECTORS; ++i) store(factors + i * LANES, x[i] * factor);
      scales.units[g] = top * (1 / WEIGHT_UNIT);
    }
    return {
        reinterpret_cast<const uint8_t*>(static_cast<const uint32_t*>(values.data) + block * each),
        values.padded()};
  }
};

}  // namespace
}  // namespace jinfer
