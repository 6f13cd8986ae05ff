// Old keys and values that are stored as numbers, rounded to integers.
//
// Each number of a split's keys is rounded about the middle of its own range, in steps of its own:
// a query's product with the middles is one number for all keys, and the steps are multiplied into
// the query before it is rounded. So numbers that are large in every key cost the others no bits
// (SageAttention, arXiv 2410.02367, subtracts the keys' mean; KIVI, arXiv 2402.02750, has scales of
// each number). A block's values have one scale, a power of two.
#pragma once

#include "attention/attention_int8.h"

namespace jinfer {
namespace {

constexpr int BYTES = 4 * LANES;  // numbers whose bytes are a vector

// Numbers d .. d + LANES of a vector of `dim`, zeros beyond.
template <class T>
inline Floats load_group(const T* from, int d, int dim) {
  return d < dim ? load(from + d) : Floats{};
}

// The smallest and the largest of each number of a split's keys.
struct KeyRanges {
  void *low, *high;      // as stored
  float *middle, *half;  // not finite where a key is not

  // Integers in the order of the floating-point numbers with these bits, and back.
  static __m512i in_order(__m512i bits) {
    return _mm512_xor_si512(bits, _mm512_srli_epi16(_mm512_srai_epi16(bits, 15), 1));
  }

  // Takes in BLOCK_KEYS keys, and prefetches memory `ahead` of them.
  template <class T>
  void add(const T* keys, int dim, int64_t ahead, bool first) const {
    constexpr int COUNT = 32;
    for (int d = 0; d < dim; d += COUNT) {
      const __mmask32 there = dim - d >= COUNT ? ~0u : (1u << (dim - d)) - 1;
      const auto numbers = [&](const void* from) {
        return in_order(_mm512_maskz_loadu_epi16(there, from));
      };
      T *lowest = static_cast<T*>(low) + d, *highest = static_cast<T*>(high) + d;
      __m512i least = numbers(first ? keys + d : lowest);
      __m512i most = numbers(first ? keys + d : highest);
#pragma GCC unroll 4
      for (int j = 0; j < BLOCK_KEYS; ++j) {
        const T* at = keys + j * int64_t(dim) + d;
        __builtin_prefetch(at + ahead, 0, 2);
        const __m512i x = numbers(at);
        least = _mm512_min_epi16(least, x), most = _mm512_max_epi16(most, x);
      }
      _mm512_storeu_si512(lowest, in_order(least));
      _mm512_storeu_si512(highest, in_order(most));
    }
  }

  template <class T>
  void finish(int dim) const {
    for (int d = 0; d < dim; d += LANES) {
      const Floats least = load(static_cast<const T*>(low) + d);
      const Floats most = load(static_cast<const T*>(high) + d);
      store(middle + d, 0.5f * (most + least)), store(half + d, 0.5f * (most - least));
    }
  }
};

// Rounds BLOCK_KEYS keys to bytes of which 128 is 0, in columns [words][BLOCK_KEYS]. Memory `ahead`
// of them is prefetched.
template <class T>
void round_keys(const T* keys, int dim, int64_t ahead, const KeyRanges& ranges,
                int32_t* columns) {
  for (int begin = 0; begin < dim; begin += BYTES) {
    Floats factor[4], base[4];
    for (int i = 0; i < 4; ++i) {
      const Floats half = load_group(ranges.half, begin + i * LANES, dim);
      const Floats middle = load_group(ranges.middle, begin + i * LANES, dim);
      factor[i] = half > 1e-30f ? 127.0f / half : Floats{};
      base[i] = 128.0f - middle * factor[i];
    }
    const bool whole = begin + BYTES <= dim;
    for (int j = 0; j < BLOCK_KEYS; j += LANES) {
      Floats rounded[LANES];
#pragma GCC unroll 16
      for (int k = 0; k < LANES; ++k) {
        const T* key = keys + (j + k) * int64_t(dim) + begin;
        for (int i = 0; i < BYTES; i += 2 * LANES)
          __builtin_prefetch(key + i + ahead, 0, 2);
        Floats x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          x[i] = multiply_add(
              whole ? load(key + i * LANES) : load_group(key, i * LANES, dim - begin), factor[i],
              base[i]);
        rounded[k] = (Floats)as_bytes<true>(x);
      }
      transpose(rounded);
#pragma GCC unroll 16
      for (int w = 0; w < LANES; ++w)
        store_words(columns + (begin / 4 + w) * BLOCK_KEYS + j, (Ints)rounded[w]);
    }
  }
}

// The largest magnitude of `count` numbers, a multiple of 16; not finite if any is not.
template <class T>
float highest_magnitude(const T* from, int64_t count) {
  __m512i most = _mm512_setzero_si512();
  const auto take = [&](__m512i x) {
    most = _mm512_max_epi16(most, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
  };
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + 32 <= count; i += 32) take(_mm512_loadu_si512(from + i));
  T each[32];
  _mm512_storeu_si512(each, most);
  Ints largest = larger(magnitude(load(each)), magnitude(load(each + LANES)));
  return float_of(_mm512_reduce_max_epi32((__m512i)largest));
}

// Keys or values of 16-bit numbers.
template <class T>
struct StoredVectors {
  const T* data;
  int dim;

  explicit StoredVectors(const CachedVectors& cache)
      : data(static_cast<const T*>(cache.data)), dim(cache.dim) {}
  const T* of(int64_t vector) const { return data + vector * dim; }
  // How far the second vector is from the first.
  int64_t ahead(int64_t first, int64_t second) const { return (second - first) * dim; }
};

// Keys and values of a split. Memory of its `next` block and of the `later` split is prefetched.
template <class T>
struct NumberBlocks {
  static constexpr bool scaled = false;  // keys have scales
  StoredVectors<T> keys, values;
  KeyRanges ranges;
  WeightScales scales;
  int32_t* words;
  const T* stored = nullptr;  // the block's values
  int64_t ahead = 0;
  float factor = 1;

  static int words_of(int dim) { return (dim + BYTES - 1) / BYTES * LANES; }
  static int groups_of(int) { return 1; }
  static int value_groups_of(int) { return 1; }

  template <class Reserve>
  NumberBlocks(const Call& call, const Reserve& reserve) : keys(call.keys), values(call.values) {
    ranges = {reserve(keys.dim + LANES), reserve(keys.dim + LANES), reserve(keys.dim),
              reserve(keys.dim)};
    scales = {1, values.dim, reserve(BLOCK_KEYS), reserve(LANES)};
    words = reinterpret_cast<int32_t*>(reserve(PAIRS * int64_t(values.dim)));
    std::fill(scales.factors, scales.factors + BLOCK_KEYS, WEIGHT_UNIT);
  }

  void round_queries(const float* q, int rows, const int64_t* blocks, int count,
                     const Int8Queries& to) const {
    for (int b = 0; b < count; ++b)
      ranges.add(keys.of(blocks[b]), keys.dim, keys.ahead(blocks[b], blocks[b + 1]), b == 0);
    ranges.template finish<T>(keys.dim);
    const int dim = keys.dim;
    for (int64_t r = 0; r < rows; ++r, q += dim) {
      Floats product = {};
      Ints most = {};
      for (int d = 0; d < dim; d += LANES) {
        product = multiply_add(load(q + d), load(ranges.middle + d), product);
        most = larger(most, magnitude(load(q + d) * load(ranges.half + d)));
      }
      const float top = float_of(_mm512_reduce_max_epi32((__m512i)most));
      to.round<false>(r, top, sum_lanes(product), [&](int d) {
        return load_group(q, d, dim) * load_group(ranges.half, d, dim);
      });
      to.scales[r] /= 127;  // a step is 1/127 of half a range
    }
  }

  void read_keys(int64_t block, int64_t later, int32_t* columns, float*) const {
    round_keys(keys.of(block), keys.dim, keys.ahead(block, later), ranges, columns);
  }

  void read_values(int64_t block, int64_t next, bool few) {
    stored = values.of(block), ahead = values.ahead(block, next);
    const float highest = highest_magnitude(stored, BLOCK_KEYS * int64_t(values.dim));
    int exponent = 0;
    if (std::isfinite(highest)) std::frexp(highest, &exponent);  // magnitudes are below 2^exponent
    exponent = std::max(exponent, -100);
    factor = std::ldexp(1.0f, VALUE_BITS - exponent);
    scales.units[0] = std::isfinite(highest)
                          ? std::ldexp(1.0f, exponent - VALUE_BITS) / WEIGHT_UNIT
                          : float(NAN);
    if (few) return;
    for (int i = 0; i < PAIRS; ++i)
      for (int d = 0; d < values.dim; d += LANES)
        store_words(words + i * int64_t(values.dim) + d, (Ints)join(i, d));
  }

  // Numbers d .. d + LANES of the values of a pair of keys.
  __m512i join(int pair, int d) const {
    const T* a = stored + first_of_pair(pair) * int64_t(values.dim) + d;
    const T* b = a + LANES * int64_t(values.dim);
    if (d % (2 * LANES) == 0) {
      __builtin_prefetch(a + ahead, 0, 2);
      __builtin_prefetch(b + ahead, 0, 2);
    }
    return (__m512i)joined(rounded(load(a), broadcast(factor)),
                           rounded(load(b), broadcast(factor)));
  }
};

}  // namespace
}  // namespace jinfer
