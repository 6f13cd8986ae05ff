// AVX-512 vectors of 16 lanes of 4 bytes, with VNNI, and VBMI where the target has it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

#if defined(__AVX512VBMI__)
// byte / 11 and byte % 11 of bytes below 128.
struct Elevenths {
  alignas(64) uint8_t quotient[128], rest[128];
  constexpr Elevenths() : quotient(), rest() {
    for (int i = 0; i < 128; ++i) quotient[i] = i / 11, rest[i] = i % 11;
  }
};
constexpr Elevenths kElevenths;
#endif

struct Vector {
  static constexpr int L = 16;
  static constexpr int kMaxRows = 8;           // of activations at a time
  static constexpr int kPanelRows = 4;         // the same with panels
  static constexpr int kGroups = 2;            // row groups of a panel at a time
  static constexpr bool kNarrowCodes = false;  // dot() takes codes up to 255 anyway
  static constexpr bool kByteShifts = false;   // shift_right() shifts words of 32 bits
  using I = __m512i;
  using F = __m512;

  static I load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, I v) { _mm512_storeu_si512(p, v); }
  static F load_f(const float* p) { return _mm512_loadu_ps(p); }
  static void store_f(float* p, F v) { _mm512_storeu_ps(p, v); }
  static I zero() { return _mm512_setzero_si512(); }
  static F zero_f() { return _mm512_setzero_ps(); }
  static F set_f(float v) { return _mm512_set1_ps(v); }

  // Repeats g lanes over the vector.
  template <int g>
  static I repeat(const void* p) {
    if constexpr (g == 2) return _mm512_set1_epi64(*static_cast<const long long*>(p));
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  }
  template <int g>
  static F repeat_f(const void* p) {
    return _mm512_castsi512_ps(repeat<g>(p));
  }

  template <int n>
  static I shift_right(I v) {
    return n ? _mm512_srli_epi32(v, n) : v;
  }
  template <int n>
  static I shift_left(I v) {
    return n ? _mm512_slli_epi32(v, n) : v;
  }
  static I bit_and(I v, uint32_t m) { return _mm512_and_si512(v, _mm512_set1_epi32(m)); }
  static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }

  // Codes up to `max_value` use the same kernel as those up to dot_class(most).
  static constexpr int dot_class(int) { return 255; }
  // sum += the 4 products of unsigned and signed bytes in each lane, step s < steps. `pairs`:
  // scratch of the sum, which is complete after the last step. With kNarrowCodes, `minus` subtracts
  // 128 from codes.
  template <int max_value, bool minus, int steps>
  static void dot(I& sum, I&, I codes, I x, int) {
    sum = _mm512_dpbusd_epi32(sum, codes, x);
  }
  // sum += the products of both numbers of 16 bits in each lane.
  static void dot_int16(I& sum, I codes, I x) { sum = _mm512_dpwssd_epi32(sum, codes, x); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  // Splits bytes 11 x + y < 121.
#if defined(__AVX512VBMI__)
  static constexpr bool kSplitsSevenBits = true;  // for any eighth bit
  static void split_pairs(I v, I& x, I& y) {
    const auto of = [&](const uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), v, _mm512_load_si512(table + 64));
    };
    x = of(kElevenths.quotient);
    y = of(kElevenths.rest);
  }
#else
  static constexpr bool kSplitsSevenBits = false;
  static void split_pairs(I v, I& x, I& y) {
    const I odd_bytes = _mm512_set1_epi16(-256);
    const I factor = _mm512_set1_epi16(187 << 5);  // (187 v) >> 11 = v / 11 for v < 128
    I even = _mm512_mulhi_epu16(_mm512_andnot_si512(odd_bytes, v), factor);
    I odd = _mm512_mulhi_epu16(_mm512_and_si512(odd_bytes, v), factor);
    x = _mm512_ternarylogic_epi32(even, odd, odd_bytes, 0xf8);  // even | (odd & odd_bytes)
    y = _mm512_sub_epi8(v, _mm512_mullo_epi16(x, _mm512_set1_epi16(11)));
  }
#endif
  // table[byte] for bytes below 16.
  static I lookup(const uint8_t* table, I v) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), v);
  }

  // Sums of runs of g lanes, L / g of them.
  template <int g>
  static void sum_runs(F v, float* out) {
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    if constexpr (g == 2) {
      const I even = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0);
      _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(even, v)));
    } else {
      v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
      v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
      out[0] = _mm512_cvtss_f32(v);
      out[1] = _mm_cvtss_f32(_mm512_extractf32x4_ps(v, 2));
    }
  }

  // The same of two vectors, one after the other.
  template <int g>
  static void sum_runs(F a, F b, float* out) {
    if constexpr (g == 2) {
      const I even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
      const I odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      _mm512_storeu_ps(out, _mm512_add_ps(_mm512_permutex2var_ps(a, even, b),
                                          _mm512_permutex2var_ps(a, odd, b)));
    } else {
      sum_runs<g>(a, out);
      sum_runs<g>(b, out + L / g);
    }
  }

  // `count` values of 2 bytes. Loads of the right size and no masks, which are slow here.
  static I load_halves(const void* p, int count) {
    if (count == 32) return _mm512_loadu_si512(p);
    if (count == 16) return _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
    if (count == 8) return _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
    long long few = 0;
    __builtin_memcpy(&few, p, 2 * count);
    return _mm512_castsi128_si512(_mm_cvtsi64_si128(few));
  }

  // Gathers 2-byte, or 1-byte, values of `count` at p: at[0..L) into first, at[16..16 + L) into
  // second. `count` is a power of 2; false if it is too large.
  static bool gather(const void* p, bool bytes, int count, const uint16_t* at, bool both, F& first,
                     F& second) {
    if (count > 64) return false;
    const I index = _mm512_loadu_si512(at);
    if (bytes) {
      const char* from = static_cast<const char*>(p);
      I picked;
      if (count == 64) {
        const I low = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
        const I high = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(from + 32)));
        picked = _mm512_permutex2var_epi16(low, index, high);
      } else if (count == 1) {
        picked = _mm512_set1_epi16(*from);
      } else {
        const I low = _mm512_cvtepi8_epi16(_mm512_castsi512_si256(load_halves(p, count / 2)));
        picked = _mm512_permutexvar_epi16(index, low);
      }
      first = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(picked)));
      if (both) {
        second = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(picked, 1)));
      }
      return true;
    }
    if (count == 16 && !both && at[0] == 0 && at[15] == 15) {  // in lane order
      first = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
      return true;
    }
    I picked;
    if (count == 64) {
      picked = _mm512_permutex2var_epi16(load_halves(p, 32), index,
                                         load_halves(static_cast<const uint16_t*>(p) + 32, 32));
    } else {
      picked = _mm512_permutexvar_epi16(index, load_halves(p, count));
    }
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(picked));
    if (both) second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(picked, 1));
    return true;
  }

  // Scales, and bases, of L columns: float16, in pairs if both.
  template <bool affine>
  static void load_numbers(const uint16_t* p, F& scale, F& base) {
    if constexpr (affine) {
      take_pairs(_mm512_loadu_si512(p), scale, base);
    } else {
      scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    }
  }
  static void take_pairs(I pairs, F& scale, F& base) {
    scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
    base = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
  }

  // The same for 3.5 bits, one number of each pair: 2 columns of 8 rows, each row first with the
  // numbers of x, then of y. For up to kMaxPairRows rows of activations.
  static constexpr int kMaxPairRows = kMaxRows;
  template <bool affine>
  static void load_pair_numbers(const uint16_t* p, int half, F& scale, F& base) {
    const I first = _mm512_loadu_si512(p);
    if constexpr (affine) {
      const I even = _mm512_set_epi64(14, 12, 10, 8, 6, 4, 2, 0);
      const I index = half ? _mm512_add_epi64(even, _mm512_set1_epi64(1)) : even;
      take_pairs(_mm512_permutex2var_epi64(first, index, _mm512_loadu_si512(p + 32)), scale, base);
    } else {
      const I lower = half ? _mm512_srli_epi64(first, 32) : first;
      scale = _mm512_cvtph_ps(_mm512_cvtepi64_epi32(lower));
    }
  }

  static constexpr bool kRepeated = false;  // gather() takes them by one permutation

  // Two-level numbers of 8 columns of 2 rows: one of a column's `count` int8 as float, and one of a
  // row's `count` float16, for all of its columns.
  static constexpr bool kTwoLevel = true;
  template <int count>
  static F load_int8(const int8_t* p, int which) {
    I v;
    if constexpr (count == 1) v = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
    if constexpr (count == 2) v = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
    if constexpr (count == 4) v = _mm512_loadu_si512(p);
    constexpr int width = 32 / count;
    v = _mm512_slli_epi32(v, 32 - width * (which + 1));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 32 - width));
  }
  template <int count>
  static F broadcast_f16(const uint16_t* p, int which) {
    int64_t word = 0;
    __builtin_memcpy(&word, p, 4 * count);
    const __m128i halves = _mm_cvtsi64_si128(word);
    const I row = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const I at = _mm512_add_epi32(_mm512_slli_epi32(row, count - 1), _mm512_set1_epi32(which));
    return _mm512_permutexvar_ps(at, _mm512_castps128_ps512(_mm_cvtph_ps(halves)));
  }

  // Bits of the largest magnitude of 32 values.
  static uint32_t magnitude(const float* x) {
    const I sign = _mm512_set1_epi32(0x7fffffff);
    I a = _mm512_and_si512(_mm512_loadu_si512(x), sign);
    I b = _mm512_and_si512(_mm512_loadu_si512(x + 16), sign);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
  }
  static constexpr bool kPairs = true;  // whether two columns can be quantized together
  using Pair = __m128;                  // a number of each column in the first lanes
  // Scales of 2 columns of 32 values each, with values up to `limit`, and the factors of their
  // values. A column that is not finite has the scale NaN, one below 1e-30 the scale 0.
  static Pair scales_of_pair(const float* x, float limit, F* factors) {
    const I sign = _mm512_set1_epi32(0x7fffffff);
    const auto magnitudes = [&](const float* from) {
      return _mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(from), sign),
                              _mm512_and_si512(_mm512_loadu_si512(from + 16), sign));
    };
    const I a = magnitudes(x), b = magnitudes(x + 32);
    const I both = _mm512_max_epu32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m256i half =
        _mm256_max_epu32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    __m128i max_value =
        _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    max_value = _mm_max_epu32(max_value, _mm_shuffle_epi32(max_value, 0x4e));
    const __m128 value = _mm_castsi128_ps(max_value), limits = _mm_set1_ps(limit);
    const __mmask8 finite = _mm_cmplt_epu32_mask(max_value, _mm_set1_epi32(0x7f800000));
    const __mmask8 some = _mm_mask_cmp_ps_mask(finite, value, _mm_set1_ps(1e-30f), _CMP_GE_OQ);
    const __m128 factor = _mm_maskz_div_ps(some, limits, value);
    factors[0] = _mm512_broadcastss_ps(factor);
    factors[1] = _mm512_broadcastss_ps(_mm_movehdup_ps(factor));
    const __m128 scale = _mm_maskz_div_ps(some, value, limits);
    return _mm_mask_blend_ps(finite, _mm_set1_ps(__builtin_nanf("")), scale);
  }
  static Pair mul_pair(Pair a, float b) { return _mm_mul_ps(a, _mm_set1_ps(b)); }
  // Stores 2 columns of 32 integers each as int8, word by word in turns if `in_turns`, their scales
  // and, `apart` floats after these, for each of their parts: -zero * its sum, or if zero is
  // negative the sum of its values.
  static void store_pair(const I* first, const I* second, Pair scale, int zero, int parts,
                         bool in_turns, void* codes, float* scales, int64_t apart) {
    const auto bytes = [](const I* v) {
      return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(v[0])),
                                     _mm512_cvtepi32_epi8(v[1]), 1);
    };
    const I one_by_one = _mm512_inserti64x4(_mm512_castsi256_si512(bytes(first)), bytes(second), 1);
    const I order = _mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    const I turns = _mm512_permutexvar_epi32(order, one_by_one);
    _mm512_storeu_si512(codes, in_turns ? turns : one_by_one);
    _mm_storel_epi64((__m128i*)scales, _mm_castps_si128(scale));
    const I fours = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), turns);
    __m256i of[2] = {_mm512_castsi512_si256(fours), _mm512_extracti64x4_epi64(fours, 1)};
    if (parts == 1) of[0] = _mm256_add_epi32(of[0], of[1]);
    for (int part = 0; part < parts; ++part) {
      __m128i sum =
          _mm_add_epi32(_mm256_castsi256_si128(of[part]), _mm256_extracti128_si256(of[part], 1));
      sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
      sum = zero >= 0 ? _mm_mullo_epi32(sum, _mm_set1_epi32(-zero))
                      : _mm_castps_si128(_mm_mul_ps(scale, _mm_cvtepi32_ps(sum)));
      _mm_storel_epi64((__m128i*)(scales + (part + 1) * apart), sum);
    }
  }
  static I rounded(F v) { return _mm512_cvtps_epi32(v); }
  // 32 integers to int16.
  static void to_int16(const I* v, int16_t* codes) {
    for (int i = 0; i < 2; ++i)
      _mm256_storeu_si256((__m256i*)(codes + 16 * i), _mm512_cvtepi32_epi16(v[i]));
  }
  // 32 integers to int8, and the sums of each 16.
  static void to_int8(const I* v, int8_t* codes, int32_t* sums) {
    for (int part = 0; part < 2; ++part) {
      _mm_storeu_si128((__m128i*)(codes + 16 * part), _mm512_cvtepi32_epi8(v[part]));
      sums[part] = _mm512_reduce_add_epi32(v[part]);
    }
  }
};

}  // namespace
