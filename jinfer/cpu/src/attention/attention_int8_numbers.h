// Old keys and values that are stored as numbers, rounded to integers.
//
// Each number of a split's keys is rounded about the middle of its own range, in steps of its own:
// a query's product with the middles is one number for all keys, and the steps are multiplied into
// the query before it is rounded. So numbers that are large in every key cost the others no bits
// (SageAttention, arXiv 2410.02367, subtracts the keys' mean; KIVI, arXiv 2402.02750, has scales of
// each number). A block's values have one scale, a power of two.
#pragma once

#include "attention/attention_int8.h"
#include "attention/attention_int8_cache.h"

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
  void* seen;                            // [3][dim], as add() says
  float *middle, *half, *factor, *base;  // middle and half not finite where a key is not

  // Takes in BLOCK_KEYS keys. Of bits as integers without a sign the largest is the lowest number
  // below 0, else the highest number; the smallest is the lowest number above 0, else the highest.
  // The largest with a sign is the highest number above 0.
  template <class T>
  void add(const T* keys, int dim, bool first) const {
    constexpr int COUNT = 32;
    int d = 0;
    for (; d + 2 * COUNT <= dim; d += 2 * COUNT) add_columns<2>(keys + d, dim, d, first);
    for (; d < dim; d += COUNT) {
      const __mmask32 there = dim - d >= COUNT ? ~0u : (1u << (dim - d)) - 1;
      add_columns<1>(keys + d, dim, d, first, there);
    }
  }

  // The same for W vectors from number d on, of which `there` are numbers.
  template <int W, class T>
  void add_columns(const T* keys, int64_t dim, int d, bool first, __mmask32 there = ~0u) const {
    __m512i max_value[W], least[W], top[W];
    const auto numbers = [&](const T* from, int w) {
      return W > 1 ? _mm512_loadu_si512(from + 32 * w) : _mm512_maskz_loadu_epi16(there, from);
    };
    T* to = static_cast<T*>(seen) + d;
    for (int w = 0; w < W; ++w) {
      max_value[w] = numbers(first ? keys : to, w), least[w] = numbers(first ? keys : to + dim, w);
      top[w] = numbers(first ? keys : to + 2 * dim, w);
    }
#pragma GCC unroll 4
    for (int j = 0; j < BLOCK_KEYS; ++j, keys += dim) {
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
        const __m512i x = numbers(keys, w);
        max_value[w] = _mm512_max_epu16(max_value[w], x), least[w] = _mm512_min_epu16(least[w], x);
        top[w] = _mm512_max_epi16(top[w], x);
      }
    }
    for (int w = 0; w < W; ++w) {
      _mm512_mask_storeu_epi16(to + 32 * w, there, max_value[w]);
      _mm512_mask_storeu_epi16(to + dim + 32 * w, there, least[w]);
      _mm512_mask_storeu_epi16(to + 2 * dim + 32 * w, there, top[w]);
    }
  }

  // The lowest and the highest of each number, as stored.
  template <class T>
  void ends(int dim, T* low, T* high) const {
    const auto bits = [&](int row, int d) {
      const T* from = static_cast<const T*>(seen) + row * int64_t(dim) + d;
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    };
    const auto put = [](T* to, __m256i x) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
    };
    for (int d = 0; d < dim; d += LANES) {
      const __m256i max_value = bits(0, d), least = bits(1, d), top = bits(2, d);
      const __mmask16 below = _mm256_movepi16_mask(max_value),
                      all_below = _mm256_movepi16_mask(top);
      put(low + d, _mm256_mask_blend_epi16(below, least, max_value));
      put(high + d, _mm256_mask_blend_epi16(all_below, top, least));
    }
  }

  template <class T>
  void finish(int dim, const T* lows, const T* highs) const {
    for (int d = 0; d < dim; d += LANES) {
      const Floats low = load(lows + d), high = load(highs + d);
      const Floats center = 0.5f * (high + low), radius = 0.5f * (high - low);
      const Floats steps = radius > 1e-30f ? 127.0f / radius : Floats{};
      store(middle + d, center), store(half + d, radius);
      store(factor + d, steps), store(base + d, 128.0f - center * steps);
    }
  }
};

// Rounds BLOCK_KEYS keys to bytes of which 128 is 0, in columns [words][BLOCK_KEYS]. For each word
// `ahead` bytes are prefetched from `later` on.
template <class T>
void round_keys(const T* keys, int dim, int words, const KeyRanges& ranges, const char* later,
                int ahead, int32_t* columns) {
  for (int d = 0; d < dim; d += LANES, columns += LANES / 4 * BLOCK_KEYS) {
    const Floats factor = load(ranges.factor + d), base = load(ranges.base + d);
    const T* from = keys + d;
    for (int j = 0; j < BLOCK_KEYS; j += LANES, later += ahead) {
      prefetch_lines(later, ahead);
      // Four keys' bytes in turns, of four numbers each: a quarter has the same numbers.
      __m512i x[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        Floats numbers[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, from += dim) {
          asm("" : "+r"(from));  // GCC keeps 16 pointers otherwise, in memory
          numbers[i] = multiply_add(load(from), factor, base);
        }
        x[k] = (__m512i)as_bytes(numbers);
      }
      const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44);
      const __m512i b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
      const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
      const __m512i e = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
      int32_t* to = columns + j;
      store_words(to, (Ints)_mm512_shuffle_i32x4(a, b, 0x88));
      store_words(to + BLOCK_KEYS, (Ints)_mm512_shuffle_i32x4(a, b, 0xdd));
      store_words(to + 2 * BLOCK_KEYS, (Ints)_mm512_shuffle_i32x4(c, e, 0x88));
      store_words(to + 3 * BLOCK_KEYS, (Ints)_mm512_shuffle_i32x4(c, e, 0xdd));
    }
  }
  std::fill(columns, columns + (words - dim / 4) * int64_t(BLOCK_KEYS), 0);
}

// The largest magnitude of `count` numbers, a multiple of 16; not finite if any is not.
template <class T>
float highest_magnitude(const T* from, int64_t count) {
  constexpr int CHAINS = 4;
  __m512i max_value[CHAINS];
  for (__m512i& x : max_value) x = _mm512_setzero_si512();
  const auto take = [&](__m512i& max_value, __m512i x) {
    max_value = _mm512_max_epi16(max_value, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
  };
  int64_t i = 0;
  for (; i + 32 * CHAINS <= count; i += 32 * CHAINS)
#pragma GCC unroll 4
    for (int c = 0; c < CHAINS; ++c) take(max_value[c], _mm512_loadu_si512(from + i + 32 * c));
  for (; i + 32 <= count; i += 32) take(max_value[0], _mm512_loadu_si512(from + i));
  for (int c = 1; c < CHAINS; ++c) take(max_value[0], max_value[c]);
  T each[32];
  _mm512_storeu_si512(each, max_value[0]);
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
};

// A block's values, as integers in units of 1 / factor.
template <class T>
struct NumberValues {
  static constexpr int BYTES_EACH = sizeof(T);
  const T* stored;
  int dim;
  float factor;

  // Numbers d .. d + LANES of the values of a pair of keys.
  __m512i join(int pair, int d) const {
    const T* a = stored + first_of_pair(pair) * int64_t(dim) + d;
    return (__m512i)joined(rounded(load(a), broadcast(factor)),
                           rounded(load(a + LANES * int64_t(dim)), broadcast(factor)));
  }
};

// Keys and values of a split.
template <class T>
struct NumberBlocks {
  using Values = NumberValues<T>;
  static constexpr bool scaled = false;  // keys have scales
  const Call& call;
  StoredVectors<T> keys, values;
  KeyRanges ranges;
  WeightScales scales;  // of the values read last
  bool cached = false;  // whether the split's int8 keys are in the cache

  static int words_of(int dim) { return (dim + BYTES - 1) / BYTES * LANES; }
  static int groups_of(int) { return 1; }
  static int value_groups_of(int) { return 1; }

  template <class Reserve>
  NumberBlocks(const Call& call, const Reserve& reserve)
      : call(call), keys(call.keys), values(call.values) {
    ranges = {reserve(3 * keys.dim / 2 + LANES), reserve(keys.dim), reserve(keys.dim),
              reserve(keys.dim), reserve(keys.dim)};
    scales = {1, values.dim, reserve(BLOCK_KEYS), reserve(LANES)};
    std::fill(scales.factors, scales.factors + BLOCK_KEYS, WEIGHT_UNIT);
  }

  bool have_same_ranges(const int64_t* blocks, int count) const {
    const uint64_t digest = int8_block(call, blocks[0]).digest();
    return digest && std::all_of(blocks, blocks + count, [&](int64_t block) {
             return int8_block(call, block).digest() == digest;
           });
  }

  // Finds the ranges of the blocks' keys.
  void find_ranges(const int64_t* blocks, int count) {
    cached = call.int8_keys && count == SPLIT_KEYS / BLOCK_KEYS && have_same_ranges(blocks, count);
    if (cached) {
      const Int8Block first = int8_block(call, blocks[0]);
      ranges.finish(keys.dim, reinterpret_cast<T*>(first.low()),
                    reinterpret_cast<T*>(first.high()));
      return;
    }
    for (int b = 0; b < count; ++b) ranges.add(keys.of(blocks[b]), keys.dim, b == 0);
    // They replace what was seen.
    T* seen = static_cast<T*>(ranges.seen);
    ranges.ends(keys.dim, seen, seen + keys.dim);
    ranges.finish(keys.dim, seen, seen + keys.dim);
  }

  void round_queries(const float* q, int rows, const int64_t* blocks, int count,
                     const Int8Queries& to) {
    find_ranges(blocks, count);
    const int dim = keys.dim;
    for (int64_t r = 0; r < rows; ++r, q += dim) {
      Floats product = {};
      Ints max_value = {};
      for (int d = 0; d < dim; d += LANES) {
        product = multiply_add(load(q + d), load(ranges.middle + d), product);
        max_value = larger(max_value, magnitude(load(q + d) * load(ranges.half + d)));
      }
      const float top = float_of(_mm512_reduce_max_epi32((__m512i)max_value));
      to.round(r, top, sum_lanes(product),
               [&](int d) { return load_group(q, d, dim) * load_group(ranges.half, d, dim); });
      to.scales[r] /= 127;  // a step is 1/127 of half a range
    }
  }

  const int32_t* read_keys(int64_t block, const char* later, int ahead, int32_t* columns,
                           float*) const {
    if (cached) return int8_block(call, block).columns();
    round_keys(keys.of(block), keys.dim, words_of(keys.dim), ranges, later, ahead, columns);
    return columns;
  }

  float highest_value(int64_t block) const {
    return cached ? *int8_block(call, block).highest_value()
                  : highest_magnitude(values.of(block), BLOCK_KEYS * int64_t(values.dim));
  }

  Values read_values(int64_t block) const {
    const float highest = highest_value(block);
    int exponent = 0;
    if (std::isfinite(highest)) std::frexp(highest, &exponent);  // magnitudes are below 2^exponent
    exponent = std::max(exponent, -100);
    scales.units[0] =
        std::isfinite(highest) ? std::ldexp(1.0f, exponent - VALUE_BITS) / WEIGHT_UNIT : float(NAN);
    return {values.of(block), values.dim, std::ldexp(1.0f, VALUE_BITS - exponent)};
  }

  // Writes the int8 keys of a split of whole blocks.
  void write_int8_keys(const int64_t* blocks) {
    constexpr int COUNT = SPLIT_KEYS / BLOCK_KEYS;
    find_ranges(blocks, COUNT);
    if (cached) return;
    const T* seen = static_cast<const T*>(ranges.seen);
    for (int b = 0; b < COUNT; ++b) {
      const Int8Block to = int8_block(call, blocks[b]);
      round_keys(keys.of(blocks[b]), keys.dim, words_of(keys.dim), ranges, nullptr, 0,
                 to.columns());
      memcpy(to.low(), seen, 4 * keys.dim);
      *to.highest_value() = highest_value(blocks[b]);
      to.set();
    }
  }
};

}  // namespace
}  // namespace jinfer
