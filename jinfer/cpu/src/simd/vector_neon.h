// NEON vectors of 8 lanes of 4 bytes in two registers, with dot products of bytes (FEAT_DotProd)
// and the interface of vector_avx512.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {

struct Vector {
  static constexpr int L = 8;
  static constexpr int kMaxRows = 4;  // of activations at a time
  static constexpr int kPanelRows = kMaxRows;
  static constexpr int kGroups = 2;           // row groups of a panel at a time
  static constexpr bool kNarrowCodes = true;  // dot() multiplies signed bytes
  static constexpr bool kByteShifts = true;   // shift_right() brings no bit of another byte
  static constexpr bool kSplitsSevenBits =
      false;  // split_pairs() takes no notice of the eighth bit
  static constexpr int kMaxPairRows = 0;
  static constexpr bool kPairs = false;     // there is no scales_of_pair()
  static constexpr bool kRepeated = false;  // there is no load_repeated()
  static constexpr bool kTwoLevel = false;  // there are no load_int8() and broadcast_f16()
  struct I {
    uint32x4_t low, high;
  };
  struct F {
    float32x4_t low, high;
  };

  static uint32x4_t bytes_at(const void* p) {
    return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
  }
  static I load(const void* p) { return {bytes_at(p), bytes_at(static_cast<const char*>(p) + 16)}; }
  static void store(void* p, I v) {
    vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u32(v.low));
    vst1q_u8(static_cast<uint8_t*>(p) + 16, vreinterpretq_u8_u32(v.high));
  }
  static F load_f(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static void store_f(float* p, F v) {
    vst1q_f32(p, v.low);
    vst1q_f32(p + 4, v.high);
  }
  static I zero() { return {vdupq_n_u32(0), vdupq_n_u32(0)}; }
  static F zero_f() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
  static F set_f(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }

  // Keeps the order: compilers would load all steps of a unit first and run out of registers.
  static uint32x4_t in_order(uint32x4_t v) {
    asm volatile("" : "+w"(v));
    return v;
  }
  template <int g>
  static I repeat(const void* p) {
    if constexpr (g == 8) {
      const I v = load(p);
      return {in_order(v.low), in_order(v.high)};
    }
    const uint64x2_t twice = vld1q_dup_u64(static_cast<const uint64_t*>(p));
    const uint32x4_t half = in_order(vreinterpretq_u32_u64(twice));
    return {half, half};
  }
  template <int g>
  static F repeat_f(const void* p) {
    const I v = repeat<g>(p);
    return {vreinterpretq_f32_u32(v.low), vreinterpretq_f32_u32(v.high)};
  }

  // By less than 8: in each byte.
  template <int n>
  static I shift_right(I v) {
    return {shift_right<n>(v.low), shift_right<n>(v.high)};
  }
  template <int n>
  static uint32x4_t shift_right(uint32x4_t v) {
    if constexpr (n == 0)
      return v;
    else if constexpr (n == 8)
      return vshrq_n_u32(v, 8);
    else
      return vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(v), n));
  }
  template <int n>
  static I shift_left(I v) {
    return {vshlq_n_u32(v.low, n), vshlq_n_u32(v.high, n)};
  }
  static I bit_and(I v, uint32_t m) {
    const uint32x4_t all = vdupq_n_u32(m);
    return {vandq_u32(v.low, all), vandq_u32(v.high, all)};
  }
  static I bit_or(I a, I b) { return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)}; }

  static constexpr int dot_class(int max_value) { return max_value <= 127 ? 127 : 255; }
  template <int max_value, bool minus, int steps>
  static void dot(I& sum, I& pairs, I codes, I x, int s) {
    if constexpr (max_value > 127) {
      const uint32x4_t tops = vdupq_n_u32(0x80808080u);
      codes = {veorq_u32(codes.low, tops), veorq_u32(codes.high, tops)};
    }
    sum = signed_dot(sum, codes, x);
    if constexpr (max_value > 127 && !minus) {  // what was taken off is given back: 128 times x
      const uint32x4_t ones = vdupq_n_u32(0x01010101u);
      pairs = signed_dot(s ? pairs : zero(), {ones, ones}, x);
      if (s == steps - 1) sum = add(sum, shift_left<7>(pairs));
    }
  }
  static uint32x4_t signed_dot(uint32x4_t sum, uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_s32(
        vdotq_s32(vreinterpretq_s32_u32(sum), vreinterpretq_s8_u32(a), vreinterpretq_s8_u32(b)));
  }
  static I signed_dot(I sum, I a, I b) {
    return {signed_dot(sum.low, a.low, b.low), signed_dot(sum.high, a.high, b.high)};
  }
  static uint32x4_t dot_int16(uint32x4_t sum, uint32x4_t codes, uint32x4_t x) {
    const int16x8_t q = vreinterpretq_s16_u32(codes), y = vreinterpretq_s16_u32(x);
    const int32x4_t low = vmull_s16(vget_low_s16(q), vget_low_s16(y)), high = vmull_high_s16(q, y);
    return vaddq_u32(sum, vreinterpretq_u32_s32(vpaddq_s32(low, high)));
  }
  static void dot_int16(I& sum, I codes, I x) {
    sum = {dot_int16(sum.low, codes.low, x.low), dot_int16(sum.high, codes.high, x.high)};
  }
  static I add(I a, I b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
  static F to_float(I v) {
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(v.low)),
            vcvtq_f32_s32(vreinterpretq_s32_u32(v.high))};
  }
  static F mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static F fma(F a, F b, F c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }

  static void split_pairs(I v, I& x, I& y) {
    split_pairs(v.low, x.low, y.low);
    split_pairs(v.high, x.high, y.high);
  }
  static void split_pairs(uint32x4_t v, uint32x4_t& x, uint32x4_t& y) {
    const uint8x16_t pairs = vreinterpretq_u8_u32(v), factor = vdupq_n_u8(187);
    const uint16x8_t low = vmull_u8(vget_low_u8(pairs), vget_low_u8(factor));
    const uint16x8_t high = vmull_high_u8(pairs, factor);
    // (187 v) >> 11 = v / 11 for v < 128
    const uint8x16_t quotient =
        vshrq_n_u8(vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high)), 3);
    x = vreinterpretq_u32_u8(quotient);
    y = vreinterpretq_u32_u8(vmlsq_u8(pairs, quotient, vdupq_n_u8(11)));
  }
  static I lookup(const uint8_t* table, I v) {
    const uint8x16_t values = vld1q_u8(table);
    return {vreinterpretq_u32_u8(vqtbl1q_u8(values, vreinterpretq_u8_u32(v.low))),
            vreinterpretq_u32_u8(vqtbl1q_u8(values, vreinterpretq_u8_u32(v.high)))};
  }

  template <int g>
  static void sum_runs(F v, float* out) {
    const float32x4_t twos = vpaddq_f32(v.low, v.high);
    if constexpr (g == 2) {
      vst1q_f32(out, twos);
    } else {
      const float32x2_t fours = vpadd_f32(vget_low_f32(twos), vget_high_f32(twos));
      *out = vpadds_f32(fours);
    }
  }

  static F widen(int16x8_t v) {
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(v))), vcvtq_f32_s32(vmovl_high_s16(v))};
  }
  static F widen(uint16x8_t halves) {
    const float16x8_t v = vreinterpretq_f16_u16(halves);
    return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
  }

  static bool gather(const void* p, bool bytes, int count, const uint16_t* at, bool both, F& first,
                     F& second) {
    if (bytes) {
      if (count != 16 && count != 32) return false;
      const uint8_t* from = static_cast<const uint8_t*>(p);
      const uint8x16x2_t table{{vld1q_u8(from), vld1q_u8(from + count - 16)}};
      for (int k = 0; k < (both ? 2 : 1); ++k) {
        const uint8x8_t picked = vqtbl2_u8(table, vmovn_u16(vld1q_u16(at + 16 * k)));
        (k ? second : first) = widen(vmovl_s8(vreinterpret_s8_u8(picked)));
      }
      return true;
    }
    const uint16_t* halves = static_cast<const uint16_t*>(p);
    if (at[7] == at[0]) {
      first = widen(vld1q_dup_u16(halves + at[0]));
      if (both) second = widen(vld1q_dup_u16(halves + at[16]));
      return true;
    }
    if (!both && at[7] == at[0] + 7) {
      load_numbers<false>(halves + at[0], first, second);
      return true;
    }
    if (both && at[7] == at[0] + 14) {
      load_numbers<true>(halves + at[0], first, second);
      return true;
    }
    for (int k = 0; k < (both ? 2 : 1); ++k) {
      uint16_t values[L];
      for (int i = 0; i < L; ++i) values[i] = halves[at[16 * k + i]];
      (k ? second : first) = widen(vld1q_u16(values));
    }
    return true;
  }

  template <bool affine>
  static void load_numbers(const uint16_t* p, F& scale, F& base) {
    if constexpr (affine) {
      const uint16x8x2_t apart = vld2q_u16(p);
      scale = widen(apart.val[0]);
      base = widen(apart.val[1]);
    } else {
      scale = widen(vld1q_u16(p));
    }
  }

  static uint32_t magnitude(const float* x) {
    const uint32x4_t rest = vdupq_n_u32(0x7fffffff);  // all but the sign
    uint32x4_t max_value = vdupq_n_u32(0);
    for (int i = 0; i < 32; i += 4)
      max_value = vmaxq_u32(max_value, vandq_u32(bytes_at(x + i), rest));
    return vmaxvq_u32(max_value);
  }
  static I rounded(F v) {
    return {vreinterpretq_u32_s32(vcvtnq_s32_f32(v.low)),
            vreinterpretq_u32_s32(vcvtnq_s32_f32(v.high))};
  }
  static void to_int16(const I* v, int16_t* codes) {
    for (int i = 0; i < 4; ++i)
      vst1q_s16(codes + 8 * i, vmovn_high_s32(vmovn_s32(vreinterpretq_s32_u32(v[i].low)),
                                              vreinterpretq_s32_u32(v[i].high)));
  }
  static void to_int8(const I* v, int8_t* codes, int32_t* sums) {
    for (int part = 0; part < 2; ++part, codes += 16) {
      int32x4_t q[4];
      for (int i = 0; i < 4; ++i) {
        const I& eight = v[2 * part + i / 2];
        q[i] = vreinterpretq_s32_u32(i % 2 ? eight.high : eight.low);
      }
      const int16x8_t low = vmovn_high_s32(vmovn_s32(q[0]), q[1]);
      const int16x8_t high = vmovn_high_s32(vmovn_s32(q[2]), q[3]);
      vst1q_s8(codes, vmovn_high_s16(vmovn_s16(low), high));
      sums[part] = vaddvq_s32(vaddq_s32(vaddq_s32(q[0], q[1]), vaddq_s32(q[2], q[3])));
    }
  }
};

}  // namespace
