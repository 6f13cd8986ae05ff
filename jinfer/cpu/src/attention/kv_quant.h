// KV cache vectors: reads, writes, quantizes and dequantizes keys and values, plain or as codes
// with numbers per block of 32.
//
// jinfer/quant/kv_vectors.py defines the layout, jinfer/quant/bit_packing.py that of the codes.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

template <class T>
inline void widen(const void* from, int64_t count, float* to) {
  const T* x = static_cast<const T*>(from);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(x + i));
  if (i < count) {
    const Floats rest = load_partial(x + i, count - i);
    memcpy(to + i, &rest, 4 * (count - i));
  }
}

// Converts `count` numbers to float, and back.
inline void to_floats(DType dtype, const void* from, int64_t count, float* to) {
  if (dtype == DType::f32) memcpy(to, from, 4 * count);
  if (dtype == DType::bf16) widen<BFloat16>(from, count, to);
  if (dtype == DType::f16) widen<Float16>(from, count, to);
}

inline void from_floats(DType dtype, const float* from, int64_t count, void* to) {
  uint16_t* y = static_cast<uint16_t*>(to);
  int64_t i = 0;
  if (dtype == DType::f32) {
    memcpy(to, from, 4 * count);
  } else if (dtype == DType::bf16) {
    for (; i + 16 <= count; i += 16)
      for (int j = 0; j < 16; ++j) y[i + j] = to_bf16(from[i + j]);
    for (; i < count; ++i) y[i] = to_bf16(from[i]);
  } else {
    auto within = [](float x) { return std::min(std::max(x, -65504.0f), 65504.0f); };
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
      __m512 x = _mm512_loadu_ps(from + i), max_value = _mm512_set1_ps(65504.0f);
      x = _mm512_min_ps(max_value, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), max_value), x));
      _mm256_storeu_si256((__m256i*)(y + i), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; i < count; ++i) y[i] = to_f16(within(from[i]));
  }
}

// Unpacks eight words of four codes, a code per byte; a Word may be a vector of words.
template <int bits, class Word>
inline void unpack(const Word* words, Word* codes) {
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s) {
    Word four = {};
#pragma GCC unroll 8
    for (Piece p : pieces(bits, s).of)
      four |= ((words[p.byte] >> p.low) & (((1u << p.width) - 1) * 0x01010101u)) << p.at;
    codes[s] = four;
  }
}

template <int bits>
inline void pack(const uint32_t* codes, uint32_t* words) {
  if (bits == 8) {
    memcpy(words, codes, 32);
    return;
  }
  for (int t = 0; t < bits; ++t) words[t] = 0;
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s)
#pragma GCC unroll 8
    for (Piece p : pieces(bits, s).of)
      words[p.byte] |= ((codes[s] >> p.at) & (((1u << p.width) - 1) * 0x01010101u)) << p.low;
}

// to[i] = scale * codes[i] + base, for 32 codes.
inline void dequantize(const uint8_t* codes, float scale, float base, float* to) {
#if defined(__AVX512F__)
  for (int i = 0; i < 32; i += 16) {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes + i)));
    store(to + i, scale * (Floats)_mm512_cvtepi32_ps(wide) + base);
  }
#elif defined(__AVX2__)
  for (int i = 0; i < 32; i += 8) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(codes + i)));
    store(to + i, scale * (Floats)_mm256_cvtepi32_ps(wide) + base);
  }
#elif defined(__aarch64__)
  for (int i = 0; i < 32; i += 8) {
    const uint16x8_t wide = vmovl_u8(vld1_u8(codes + i));
    store(to + i, scale * (Floats)vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))) + base);
    store(to + i + 4, scale * (Floats)vcvtq_f32_u32(vmovl_high_u16(wide)) + base);
  }
#else
  for (int i = 0; i < 32; ++i) to[i] = scale * float(codes[i]) + base;
#endif
}

// Splits pairs 11 * x + y in the bytes of eight words: x into the first eight words, y into the
// next eight.
template <class Word>
inline void split_pairs(Word* words) {
#pragma GCC unroll 8
  for (int s = 0; s < 8; ++s) {
    const Word pairs = words[s], even = pairs & 0x00ff00ffu, odd = (pairs >> 8) & 0x00ff00ffu;
    const Word x = ((even * 187u) >> 11 & 0x000f000fu) | ((odd * 187u) >> 11 & 0x000f000fu) << 8;
    words[s] = x;
    words[8 + s] = pairs - 11 * x;
  }
}

template <int bits>
void decode(const KvFormat& c, int dim, const uint32_t* words, const uint16_t* numbers, float* to) {
  for (int column = 0; column < c.columns(dim); ++column, words += bits) {
    uint32_t codes[16];
    if (bits != 8) unpack<bits>(words, codes);
    if (bits == kThreeAndAHalf) split_pairs(codes);
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(bits == 8 ? words : codes);
    for (int half = 0; half < (per_code_of(bits)); ++half, to += 32) {
      const float scale = from_f16(*numbers++);
      const float base = c.symmetric ? -scale * (c.levels / 2) : from_f16(*numbers++);
      dequantize(bytes + 32 * half, scale, base, to);
    }
  }
}

// Decodes and transposes the vectors of LANES keys: emit(d, x) with number d of each, in order of
// d.
template <int bits, class F>
inline void decode_transposed(const CachedVectors& cache, const int64_t* vectors, Words* turned,
                              const F& emit) {
  const KvFormat& c = cache.format;
  const int words = c.words(cache.dim), numbers = c.numbers(cache.dim), each = c.symmetric ? 1 : 2;
  for (int w = 0; w < words; w += 8) {
    const uint32_t* from[LANES];
    for (int i = 0; i < LANES; ++i)
      from[i] = static_cast<const uint32_t*>(cache.data) + vectors[i] * words + w;
    transpose_words(from, std::min(8, words - w), turned + w);
  }
  auto number = [&](int at) {
    Float16 x[LANES];
    for (int i = 0; i < LANES; ++i) x[i].bits = cache.numbers[vectors[i] * numbers + at];
    return load(x);
  };
  for (int column = 0, block = 0; column < c.columns(cache.dim); ++column, turned += bits) {
    Words codes[16];
    if (bits != 8) unpack<bits>(turned, codes);
    if (bits == kThreeAndAHalf) split_pairs(codes);
    const Words* fours = bits == 8 ? turned : codes;
    for (int half = 0; half < (per_code_of(bits)); ++half, ++block) {
      const Floats scale = number(block * each);
      const Floats base = c.symmetric ? -scale * float(c.levels / 2) : number(block * each + 1);
#pragma GCC unroll 1
      for (int s = 0; s < 8; ++s)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const Words code = (fours[8 * half + s] >> (8 * i)) & 255u;
          emit(32 * block + 4 * s + i,
               multiply_add(scale, __builtin_convertvector((Ints)code, Floats), base));
        }
    }
  }
}

// Share of a block's range that its levels cover, as REACH of jinfer/quant/kv_vectors.py.
inline float reach(int levels) {
  return levels == 4 ? 0.73f : levels == 8 ? 0.91f : levels == 11 ? 0.95f : 1.0f;
}

// Lane-wise maximum, or NaN where either is NaN; and the maximum over lanes, in every lane.
inline Floats max_or_nan(Floats a, Floats b) { return (a > b) | (a != a) ? a : b; }

template <int apart = LANES / 2>
inline Floats max_lane_or_nan(Floats x) {
  if constexpr (apart == 0) {
    return x;
  } else {
    x = max_or_nan(x, swapped<apart>(x, std::make_integer_sequence<int, LANES>{}));
    return max_lane_or_nan<apart / 2>(x);
  }
}

// Rounds to the nearest codes, as quantize_vectors of jinfer/quant/kv_vectors.py. A block with a
// NaN gets NaN numbers, so that corruption does not pass for text.
inline void encode_block(const KvFormat& c, const float* x, uint16_t* numbers, uint8_t* codes) {
  Floats lowest = load(x), max_value = lowest;
#pragma GCC unroll 8
  for (int i = LANES; i < 32; i += LANES) {
    lowest = -max_or_nan(-lowest, -load(x + i));
    max_value = max_or_nan(max_value, load(x + i));
  }
  const float low = -max_lane_or_nan(-lowest)[0], high = max_lane_or_nan(max_value)[0];
  auto half = [](float y) { return to_f16(std::min(std::max(y, -65504.0f), 65504.0f)); };
  float base = 0, offset = 0;
  if (c.symmetric) {
    offset = float(c.levels / 2);
    numbers[0] = half((high >= -low ? high : low) / -offset);
  } else {
    const float spread = high - low, share = reach(c.levels);
    numbers[0] = half(spread * (share / float(c.levels - 1)));
    numbers[1] = half(low + spread * ((1 - share) / 2));
    base = from_f16(numbers[1]);
  }
  const float scale = from_f16(numbers[0]), inverse = scale != 0 ? 1 / scale : 0;
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  alignas(64) int32_t wide[32];
#pragma GCC unroll 8
  for (int i = 0; i < 32; i += LANES) {
    Floats q = (load(x + i) - base) * inverse + offset;
    q = larger(-larger(-q, broadcast(1 - float(c.levels))), Floats{});  // NaN, too, becomes a code
    Ints rounded = __builtin_convertvector((q + magic) - magic, Ints);
    memcpy(wide + i, &rounded, sizeof rounded);
  }
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(wide[i]);
}

template <int bits>
void encode(const KvFormat& c, int dim, const float* from, uint32_t* words, uint16_t* numbers) {
  for (int column = 0; column < c.columns(dim); ++column, words += bits) {
    alignas(32) uint8_t codes[64];
    for (int half = 0; half < c.per_code; ++half) {
      const int at = 32 * (column * c.per_code + half);
      const float* block = from + at;
      float padded[32];
      if (at + 32 > dim) {
        for (int i = 0; i < 32; ++i) padded[i] = from[std::min(at + i, dim - 1)];
        block = padded;
      }
      encode_block(c, block, numbers, codes + 32 * half);
      numbers += c.symmetric ? 1 : 2;
    }
    if (bits == kThreeAndAHalf)
      for (int i = 0; i < 32; ++i) codes[i] = 11 * codes[i] + codes[32 + i];
    pack<bits>(reinterpret_cast<const uint32_t*>(codes), words);
  }
}

template <class F>
inline void each_width(int bits, F f) {
  switch (bits) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    case kThreeAndAHalf: return f(std::integral_constant<int, kThreeAndAHalf>{});
    default: return f(std::integral_constant<int, 8>{});
  }
}

// Reads vectors first .. first + count as floats, zero-padded.
inline const float* read(const CachedVectors& cache, int64_t first, int count, float* scratch) {
  const int dim = cache.dim, stride = cache.padded();
  if (cache.dtype == DType::quantized) {
    const KvFormat& c = cache.format;
    const uint32_t* words = static_cast<const uint32_t*>(cache.data) + first * c.words(dim);
    const uint16_t* numbers = cache.numbers + first * c.numbers(dim);
    each_width(c.bits, [&](auto bits) {
      for (int i = 0; i < count; ++i)
        decode<bits.value>(c, dim, words + i * c.words(dim), numbers + i * c.numbers(dim),
                           scratch + int64_t(i) * stride);
    });
  } else {
    const char* from = static_cast<const char*>(cache.data) + first * dim * bytes_of(cache.dtype);
    for (int i = 0; i < count; ++i, from += dim * bytes_of(cache.dtype))
      to_floats(cache.dtype, from, dim, scratch + int64_t(i) * stride);
  }
  for (int i = 0; i < count && dim < stride; ++i)
    std::fill(scratch + int64_t(i) * stride + dim, scratch + int64_t(i + 1) * stride, 0.0f);
  return scratch;
}

// Prefetches vectors that will be needed soon.
inline void prefetch(const CachedVectors& cache, int64_t vector, int count) {
  auto lines = [](const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    asm volatile("");  // keeps the compiler from dropping calls of a function without effects
  };
  if (cache.dtype != DType::quantized) {
    const int64_t bytes = int64_t(cache.dim) * bytes_of(cache.dtype);
    return lines(static_cast<const char*>(cache.data) + vector * bytes, count * bytes);
  }
  const int64_t words = 4 * cache.format.words(cache.dim),
                numbers = cache.format.numbers(cache.dim);
  lines(static_cast<const char*>(cache.data) + vector * words, count * words);
  lines(reinterpret_cast<const char*>(cache.numbers + vector * numbers), 2 * count * numbers);
}

// Writes a vector, quantizing it if the cache is quantized.
inline void write_vector(const CachedVectors& cache, int64_t at, const float* from) {
  const int dim = cache.dim;
  if (cache.dtype == DType::quantized) {
    const KvFormat& c = cache.format;
    uint32_t* words = static_cast<uint32_t*>(cache.data) + at * c.words(dim);
    uint16_t* numbers = cache.numbers + at * c.numbers(dim);
    each_width(c.bits, [&](auto bits) { encode<bits.value>(c, dim, from, words, numbers); });
  } else {
    from_floats(cache.dtype, from, dim,
                static_cast<char*>(cache.data) + at * dim * bytes_of(cache.dtype));
  }
}

}  // namespace
}  // namespace jinfer
