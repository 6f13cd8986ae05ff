// AVX2 vectors of 8 lanes of 4 bytes, with the interface of vector_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Vector {
  static constexpr int L = 8;
  static constexpr int kMaxRows = 4;  // of activations at a time
  static constexpr int kPanelRows = kMaxRows;
  static constexpr int kGroups = 2;  // row groups of a panel at a time
#if defined(JINFER_AVXVNNI)
  static constexpr bool kNarrowCodes = false;  // dot() takes codes up to 255 anyway
#else
  static constexpr bool kNarrowCodes = true;  // dot() needs to know codes over 127
#endif
  static constexpr bool kByteShifts = false;
  static constexpr bool kSplitsSevenBits =
      false;  // split_pairs() takes no notice of the eighth bit
  using I = __m256i;
  using F = __m256;

  static I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  static void store(void* p, I v) { _mm256_storeu_si256(static_cast<I*>(p), v); }
  static F load_f(const float* p) { return _mm256_loadu_ps(p); }
  static void store_f(float* p, F v) { _mm256_storeu_ps(p, v); }
  static I zero() { return _mm256_setzero_si256(); }
  static F zero_f() { return _mm256_setzero_ps(); }
  static F set_f(float v) { return _mm256_set1_ps(v); }

  template <int g>
  static I repeat(const void* p) {
    if constexpr (g == 2) return _mm256_set1_epi64x(*static_cast<const long long*>(p));
    return load(p);
  }
  template <int g>
  static F repeat_f(const void* p) {
    return _mm256_castsi256_ps(repeat<g>(p));
  }

  template <int n>
  static I shift_right(I v) {
    return n ? _mm256_srli_epi32(v, n) : v;
  }
  template <int n>
  static I shift_left(I v) {
    return n ? _mm256_slli_epi32(v, n) : v;
  }
  static I bit_and(I v, uint32_t m) { return _mm256_and_si256(v, _mm256_set1_epi32(m)); }
  static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }

#if defined(JINFER_AVXVNNI)
  static constexpr int dot_class(int) { return 255; }
  template <int max_value, bool minus, int steps>
  static void dot(I& sum, I&, I codes, I x, int) {
    sum = _mm256_dpbusd_avx_epi32(sum, codes, x);
  }
#else
  // Sums of two products have 16 bits; as many steps as fit are added before widening to 32.
  static constexpr int dot_class(int max_value) {
    return max_value <= 16 ? 16 : max_value <= 64 ? 64 : max_value <= 127 ? 127 : 255;
  }
  template <int max_value, bool minus, int steps>
  static void dot(I& sum, I& pairs, I codes, I x, int s) {
    constexpr int fit = 32767 / (2 * 127 * max_value), apart = fit < steps ? fit / 2 * 2 : steps;
    if constexpr (apart > 1) {
      static_assert(steps % apart == 0);
      const I two = _mm256_maddubs_epi16(codes, x);
      pairs = s % apart ? in_order(_mm256_add_epi16(pairs, two)) : two;
      if (s % apart == apart - 1) sum = widen(sum, pairs);
      return;
    }
    if constexpr (minus) {
      codes = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
      x = _mm256_sign_epi8(x, codes);
      codes = _mm256_abs_epi8(codes);        // 2 * 128 * 127 fits into 16 bits
    } else if constexpr (max_value > 127) {  // 2 * 255 * 127 would not: the highest bit apart
      I top = _mm256_and_si256(_mm256_srli_epi16(codes, 7), _mm256_set1_epi8(1));
      top = _mm256_maddubs_epi16(top, x);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(top, _mm256_set1_epi16(128)));
      codes = _mm256_and_si256(codes, _mm256_set1_epi8(127));
    }
    sum = widen(sum, _mm256_maddubs_epi16(codes, x));
  }
  static I widen(I sum, I pairs) {
    return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  }
  // Keeps the order: compilers would add up in a tree, which needs more than 16 registers.
  static I in_order(I v) {
    asm("" : "+x"(v));
    return v;
  }
#endif
  // sum += the products of both numbers of 16 bits in each lane.
  static void dot_int16(I& sum, I codes, I x) {
#if defined(JINFER_AVXVNNI)
    sum = _mm256_dpwssd_avx_epi32(sum, codes, x);
#else
    const I both = _mm256_madd_epi16(codes, x);
    // Compilers would add into another register and move it back.
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(both));
#endif
  }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static void split_pairs(I v, I& x, I& y) {
    const I odd_bytes = _mm256_set1_epi16(-256);
    const I factor = _mm256_set1_epi16(187 << 5);
    const I even = _mm256_mulhi_epu16(_mm256_andnot_si256(odd_bytes, v), factor);
    const I odd = _mm256_mulhi_epu16(v, factor);  // an even byte < 121 does not reach its quotient
    x = _mm256_blendv_epi8(even, odd, odd_bytes);
    I eleven = _mm256_set1_epi16(11);
    asm("" : "+x"(eleven));  // hides the constant: compilers would expand the multiplication
    y = _mm256_sub_epi8(v, _mm256_mullo_epi16(x, eleven));
  }
  static I lookup(const uint8_t* table, I v) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), v);
  }

  template <int g>
  static void sum_runs(F v, float* out) {
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    if constexpr (g == 2) {
      const I even = _mm256_set_epi32(0, 0, 0, 0, 6, 4, 2, 0);
      _mm_storeu_ps(out, _mm256_castps256_ps128(_mm256_permutevar8x32_ps(v, even)));
    } else {
      v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4e));
      v = _mm256_add_ps(v, _mm256_castps128_ps256(_mm256_extractf128_ps(v, 1)));
      out[0] = _mm256_cvtss_f32(v);
    }
  }

  static bool gather(const void* p, bool bytes, int, const uint16_t* at, bool both, F& first,
                     F& second) {
    const auto* halves = static_cast<const uint16_t*>(p);
    if (!bytes && !both && at[7] == at[0] + 7) {
      first = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + at[0])));
      return true;
    }
    if (!bytes && both && at[7] == at[0] + 14) {
      load_numbers<true>(halves + at[0], first, second);
      return true;
    }
    for (int k = 0; k < (both ? 2 : 1); ++k) {
      F& out = k ? second : first;
      if (bytes) {
        int32_t values[L];
        for (int i = 0; i < L; ++i) values[i] = static_cast<const int8_t*>(p)[at[16 * k + i]];
        out = to_float(load(values));
      } else {
        uint16_t values[L];
        for (int i = 0; i < L; ++i) values[i] = halves[at[16 * k + i]];
        out = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
      }
    }
    return true;
  }

  template <bool affine>
  static void load_numbers(const uint16_t* p, F& scale, F& base) {
    if constexpr (affine) {
      const I pairs = load(p);
      const I apart = _mm256_permute4x64_epi64(
          _mm256_packus_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)),
                              _mm256_srli_epi32(pairs, 16)),
          0xd8);
      scale = _mm256_cvtph_ps(_mm256_castsi256_si128(apart));
      base = _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
    } else {
      scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
  }

  // Numbers of four rows, each for two lanes: of blocks that span both columns of a row, or more.
  static constexpr bool kPairs = false;  // there is no scales_of_pair()
  static constexpr bool kRepeated = true;
  template <bool affine>
  static void load_repeated(const uint16_t* p, F& scale, F& base) {
    if constexpr (affine) {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      scale = _mm256_cvtph_ps(_mm_blend_epi16(pairs, _mm_slli_epi32(pairs, 16), 0xaa));
      base = _mm256_cvtph_ps(_mm_blend_epi16(pairs, _mm_srli_epi32(pairs, 16), 0x55));
    } else {
      const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      scale = _mm256_cvtph_ps(_mm_unpacklo_epi16(four, four));
    }
  }

  // The same for 3.5 bits, one number of each pair: 2 columns of 4 rows, each row first with the
  // numbers of x, then of y. For up to kMaxPairRows rows of activations; more would run out of
  // registers, and read numbers from a panel.
  static constexpr int kMaxPairRows = 2;
  template <bool affine>
  static void load_pair_numbers(const uint16_t* p, int half, F& scale, F& base) {
    const I first = load(p);
    if constexpr (affine) {
      const I second = load(p + 16);
      const I pairs = half ? _mm256_unpackhi_epi64(first, second)
                           : _mm256_unpacklo_epi64(first, second);  // of rows 0, 2, 1, 3
      const I mixed = _mm256_packus_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)),
                                          _mm256_srli_epi32(pairs, 16));
      const I apart = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      scale = _mm256_cvtph_ps(_mm256_castsi256_si128(apart));
      base = _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1));
    } else {
      const I even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
      const I at = half ? _mm256_add_epi32(even, _mm256_set1_epi32(1)) : even;
      scale = _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permutevar8x32_epi32(first, at)));
    }
  }

  // Two-level numbers of 8 columns of one row.
  static constexpr bool kTwoLevel = true;
  template <int count>
  static F load_int8(const int8_t* p, int which) {
    I v;
    if constexpr (count == 1) v = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
    if constexpr (count == 2) v = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    if constexpr (count == 4) v = load(p);
    constexpr int width = 32 / count;
    v = _mm256_slli_epi32(v, 32 - width * (which + 1));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 32 - width));
  }
  template <int count>
  static F broadcast_f16(const uint16_t* p, int which) {
    return _mm256_set1_ps(_cvtsh_ss(p[which]));
  }

  static uint32_t magnitude(const float* x) {
    const I sign = _mm256_set1_epi32(0x7fffffff);
    I max_value = _mm256_and_si256(load(x), sign);
    for (int i = 8; i < 32; i += 8)
      max_value = _mm256_max_epu32(max_value, _mm256_and_si256(load(x + i), sign));
    __m128i half =
        _mm_max_epu32(_mm256_castsi256_si128(max_value), _mm256_extracti128_si256(max_value, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1)));
  }
  static I rounded(F v) { return _mm256_cvtps_epi32(v); }
  static void to_int16(const I* v, int16_t* codes) {
    for (int i = 0; i < 2; ++i)
      store(codes + 16 * i,
            _mm256_permute4x64_epi64(_mm256_packs_epi32(v[2 * i], v[2 * i + 1]), 0xd8));
  }
  static void to_int8(const I* v, int8_t* codes, int32_t* sums) {
    for (int part = 0; part < 2; ++part, codes += 16) {
      const I a = v[2 * part], b = v[2 * part + 1];
      const I words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
      const __m128i bytes =
          _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), bytes);
      const I sum = _mm256_add_epi32(a, b);
      __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
      half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
      sums[part] = _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
    }
  }
};

}  // namespace
