// Quantized GEMV for few rows, over the including file's `Vector`: codes are decoded in registers
// and go straight into dot products, without a panel in memory.
//
// It adds what multiply_int8() and store_outputs() add, in their order: bits are equal.
//
// Memory is the bottleneck: weights are one stream, read in order and once; everything that does
// not depend on the row group is hoisted; upcoming lines are prefetched.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "linear/linear_unpack.h"

namespace {

constexpr int64_t kFarPrefetch = 24 << 10, kNearPrefetch = 5 << 10;  // bytes
constexpr int kWholeTileRows = 2;  // most rows for which a tile is processed as a whole

// Whether so many rows are bound by memory.
constexpr bool is_memory_bound(int bits, int count) {
  return count == 1 || (count == 2 && (bits == 6 || bits == 8));
}

// Prefetches into L2, kFarPrefetch ahead. Where the hardware prefetcher does better and the core
// does little else (`alone`): kNearPrefetch ahead into L1, or not at all for 8 bits.
template <int bits>
inline void prefetch(const uint32_t* line, bool alone) {
  if (!alone) {
    __builtin_prefetch(line + kFarPrefetch / 4, 0, 2);
  } else if (bits < 8) {
    __builtin_prefetch(line + kNearPrefetch / 4, 0, 3);
  }
}

// Whether a kernel for so many rows reads numbers as stored, not from a panel.
inline bool in_lane_order_for(const MatmulPlan& plan, int count) {
  return plan.in_lane_order && (plan.matrix->per_code == 1 || count <= Vector::kMaxPairRows);
}

// Rows of activations.
struct GemvRows {
  const char* const* x;  // the last row repeated up to the kernel's count
  int count;
  Results results;
};

// Loads a vector once: compilers would load it again for other halves of bytes.
inline Vector::I load_once(const void* p) {
  Vector::I v = Vector::load(p);
#if defined(__AVX512F__)
  asm volatile("" : "+v"(v));
#endif
  return v;
}

// Numbers of a vector's columns, stored in lane order.
template <int per_code, bool affine, class V = Vector>
inline void load_numbers(const uint16_t* p, int half, Vector::F& scale, Vector::F& base) {
  if constexpr (per_code == 1) {
    Vector::load_numbers<affine>(p, scale, base);
  } else if constexpr (V::kMaxPairRows > 0) {
    V::template load_pair_numbers<affine>(p, half, scale, base);
  }
}

// The same for two-level numbers, for one of a column's parts.
template <int parts, bool affine, class V = Vector>
inline void load_two_level(const int8_t* small, const uint16_t* steps, int part, Vector::F& scale,
                           Vector::F& base) {
  if constexpr (V::kTwoLevel) {
    constexpr int numbers = affine ? 2 : 1;
    const auto number = [&](int which) {
      return V::mul(V::template load_int8<parts * numbers>(small, part * numbers + which),
                    V::template broadcast_f16<numbers>(steps, which));
    };
    scale = number(0);
    if (affine) base = number(1);
  }
}

template <class F, int... s>
inline __attribute__((always_inline)) void static_for(F f, std::integer_sequence<int, s...>) {
  (f(std::integral_constant<int, s>{}), ...);
}

// GEMV for row groups begin .. end - 1. Few rows take whole tiles in memory order; more rows have
// registers for one vector only. `numbers`: scratch for the numbers of `whole` row groups, unless
// stored in lane order.
template <int bits, int g, int count, int parts, bool coded>
void multiply_gemv(const MatmulPlan& plan, const GemvRows& rows, int64_t begin, int64_t end,
                   float* numbers) {
  constexpr int per_code = per_code_of(bits), height = L / g, steps = 8 / parts;
  constexpr int whole = count <= kWholeTileRows ? kTile / L : 1;
  constexpr int max_value = max_code(bits, coded);
  constexpr bool wide = Vector::kNarrowCodes && max_value > 127;
  constexpr bool levels = g == 8 && Vector::kTwoLevel;
  constexpr int64_t record = (36 + 4 * parts) * g;
  const Matrix& m = *plan.matrix;
  const bool affine = m.affine(),
             alone = is_memory_bound(bits, count) && jinfer::prefers_hardware_prefetch();
  const bool in_lane_order = in_lane_order_for(plan, count);
  const uint32_t zeros = affine || wide ? 0 : ~0u;  // mask: whether to add -zero * sum of codes
  const int64_t superblocks = m.superblocks, stride = superblocks * per_code * parts * L;
  constexpr int64_t groups_of_tile = kTile / L;
  const char* x[count];
  for (int r = 0; r < count; ++r) x[r] = rows.x[r];
  for (int64_t group = begin; group < end; group += whole) {
    const int64_t tile = group / groups_of_tile, in_tile = group % groups_of_tile;
    const uint32_t* words = m.words + tile * superblocks * bits * kTile + in_tile * L;
    const int64_t row = tile * superblocks * m.R + in_tile * height;
    // As stored: a block is a column.
    const uint16_t* stand = static_cast<const uint16_t*>(m.scales) + row * g * per_code * m.numbers;
    const int8_t* small = static_cast<const int8_t*>(m.scales) + row * g * parts * m.numbers;
    const uint16_t* steps_at = levels ? m.steps + row * m.numbers : nullptr;
    if (!in_lane_order)
      for (int v = 0; v < whole; ++v)
        plan.fill(plan, row + v * height, superblocks, numbers + 2 * v * stride,
                  numbers + (2 * v + 1) * stride);

    Vector::F total[whole][count];
    UNROLL
    for (int v = 0; v < whole; ++v) {
      UNROLL
      for (int r = 0; r < count; ++r) total[v][r] = Vector::zero_f();
    }
    for (int64_t u = 0, at = 0; u < superblocks; ++u, at += record * per_code) {
      Vector::I w[whole][bits];
      UNROLL
      for (int b = 0; b < bits; ++b) {
        UNROLL
        for (int v = 0; v < whole; ++v) w[v][b] = load_once(words + b * kTile + v * L);
        prefetch<bits>(words + b * kTile, alone);
      }
      words += bits * kTile;
      auto part_of = [&](auto part_constant) __attribute__((always_inline)) {
        constexpr int part = decltype(part_constant)::value, sum = (36 + 4 * part) * g;
        // Two sums for a single row, to break the dependency between steps.
        constexpr bool two = count == 1 && whole == 1;
        Vector::I within[whole][per_code][count], pairs[whole][per_code][count], second[per_code];
        UNROLL
        for (int h = 0; h < per_code; ++h) {
          second[h] = Vector::zero();
          UNROLL
          for (int r = 0; r < count; ++r) {
            const Vector::I from = Vector::repeat<g>(x[r] + at + h * record + sum);
            UNROLL
            for (int v = 0; v < whole; ++v) within[v][h][r] = Vector::bit_and(from, zeros);
          }
        }
        auto step = [&](auto step_constant) __attribute__((always_inline)) {
          constexpr int s = part * steps + decltype(step_constant)::value;
          Vector::I codes[whole][per_code];
          UNROLL
          for (int v = 0; v < whole; ++v) {
            codes[v][0] = unpack_four<bits, s>(w[v]);
            if constexpr (per_code == 2) Vector::split_pairs(codes[v][0], codes[v][0], codes[v][1]);
            if constexpr (coded) codes[v][0] = Vector::lookup(m.codebook, codes[v][0]);
          }
          UNROLL
          for (int h = 0; h < per_code; ++h) {
            UNROLL
            for (int r = 0; r < count; ++r) {
              const Vector::I by = Vector::repeat<g>(x[r] + at + h * record + s * 4 * g);
              UNROLL
              for (int v = 0; v < whole; ++v) {
                Vector::I& sum = two && s % 2 ? second[h] : within[v][h][r];
                Vector::dot<max_value, wide, steps>(sum, pairs[v][h][r], codes[v][h], by,
                                                    s - part * steps);
              }
            }
          }
        };
        static_for(step, std::make_integer_sequence<int, steps>{});
        UNROLL
        for (int h = 0; h < per_code; ++h) {
          if (two) within[0][h][0] = Vector::add(within[0][h][0], second[h]);
          Vector::F by[count];
          UNROLL
          for (int r = 0; r < count; ++r)
            by[r] = Vector::repeat_f<g>(x[r] + at + h * record + 32 * g);
          UNROLL
          for (int v = 0; v < whole; ++v) {
            Vector::F scale, base;
            constexpr bool can_be = parts == 1 && (per_code == 1 || count <= Vector::kMaxPairRows);
            if (levels && in_lane_order) {
              if (affine) {
                load_two_level<parts, true>(small + 2 * v * L * parts, steps_at + 2 * v, part,
                                            scale, base);
              } else {
                load_two_level<parts, false>(small + v * L * parts, steps_at + v, part, scale,
                                             base);
              }
            } else if (can_be && in_lane_order) {
              if (affine) {
                load_numbers<per_code, true>(stand + 2 * per_code * v * L, h, scale, base);
              } else {
                load_numbers<per_code, false>(stand + per_code * v * L, h, scale, base);
              }
            } else {
              const float* at = numbers + 2 * v * stride + ((u * per_code + h) * parts + part) * L;
              scale = Vector::load_f(at);
              base = Vector::load_f(affine ? at + stride : at);
            }
            UNROLL
            for (int r = 0; r < count; ++r)
              total[v][r] = Vector::fma(Vector::to_float(within[v][h][r]),
                                        Vector::mul(scale, by[r]), total[v][r]);
            if (affine) {
              UNROLL
              for (int r = 0; r < count; ++r) {
                const Vector::F x_sum = Vector::repeat_f<g>(x[r] + at + h * record + sum);
                total[v][r] = Vector::fma(base, x_sum, total[v][r]);
              }
            }
          }
        }
      };
      static_for(part_of, std::make_integer_sequence<int, parts>{});
      stand += kTile * per_code * m.numbers;
      small += kTile * parts * m.numbers;
      if (levels) steps_at += m.R * m.numbers;
    }
    for (int v = 0; v < whole; ++v) {
      for (int r = 0; r < rows.count; ++r)
        store_sums<g>(total[v][r], rows.results.of[r], (group + v) * height, m.outputs);
    }
  }
}

using Gemv = void (*)(const MatmulPlan&, const GemvRows&, int64_t, int64_t, float*);

// The kernel for a matrix; null: use panels.
template <int count>
Gemv gemv_of(const MatmulPlan& plan) {
  const Matrix& m = *plan.matrix;
  const bool coded = m.codebook != nullptr;
  if (coded && m.bits != 4) return nullptr;
  // Codes over 127 have 128 subtracted, the zero of symmetric formats.
  if (Vector::kNarrowCodes && m.bits == 8 && m.affine()) return nullptr;
  if (!m.steps) {
    switch (m.bits) {
      case 2: return multiply_gemv<2, 2, count, 1, false>;
      case 3: return multiply_gemv<3, 2, count, 1, false>;
      case 4:
        return coded ? multiply_gemv<4, 2, count, 1, true> : multiply_gemv<4, 2, count, 1, false>;
      case 5: return multiply_gemv<5, 2, count, 1, false>;
      case 6: return multiply_gemv<6, 2, count, 1, false>;
      case kThreeAndAHalf:
        if constexpr (2 * count <= Vector::kMaxRows)
          return multiply_gemv<kThreeAndAHalf, 2, count, 1, false>;
        return nullptr;
      case 8: return multiply_gemv<8, 2, count, 1, false>;
    }
  }
  if constexpr (count <= 4) {  // more rows are as fast with panels
    if (m.steps) {
      if (plan.parts == 2) {
        if (m.bits == 2) return multiply_gemv<2, 8, count, 2, false>;
        if (m.bits == 3) return multiply_gemv<3, 8, count, 2, false>;
        if (m.bits == 4 && coded) return multiply_gemv<4, 8, count, 2, true>;
        if (m.bits == 6) return multiply_gemv<6, 8, count, 2, false>;
      } else {
        if (m.bits == 4)
          return coded ? multiply_gemv<4, 8, count, 1, true> : multiply_gemv<4, 8, count, 1, false>;
        if (m.bits == 5) return multiply_gemv<5, 8, count, 1, false>;
      }
    }
  }
  return nullptr;
}

// The kernel for so many rows, or slightly more; at most Vector::kMaxRows.
Gemv gemv_for(const MatmulPlan& plan, int64_t rows) {
  if (rows == 1) return gemv_of<1>(plan);
  if (rows == 2) return gemv_of<2>(plan);
  if constexpr (Vector::kMaxRows == 8) {
    if (rows > 4) return gemv_of<8>(plan);
  }
  return gemv_of<4>(plan);
}

// Most rows for GEMV: more rows than a kernel takes go one after the other over weights that stay
// in a cache. Beyond, a panel is faster.
constexpr int64_t kGemvRows = (Vector::kMaxRows == 8 ? 4 : 3) * Vector::kMaxRows;
// The same for two-level formats, whose panels take longer to make.
constexpr int64_t kGemvTwoLevelRows = 5 * Vector::kMaxRows;
constexpr int64_t kGemvWordBytes = 32 << 10;

// GEMV for up to kGemvRows rows, or kGemvTwoLevelRows; false if there is no kernel.
bool try_gemv(const MatmulPlan& plan, const Activations& x, int64_t rows, int64_t begin,
              int64_t end, float* y, int64_t stride, Scratch& scratch) {
  // 3.5 bits: registers suffice for 4 rows.
  const bool fours = plan.matrix->per_code == 2 && Vector::kMaxRows == 8;
  const int64_t max_rows = fours ? 4 : Vector::kMaxRows;
  if (rows > (fours ? 12 : plan.matrix->steps ? kGemvTwoLevelRows : kGemvRows)) return false;
  const int64_t left = rows % max_rows ? rows % max_rows : max_rows;
  const Gemv full = gemv_for(plan, std::min(rows, max_rows)), last = gemv_for(plan, left);
  if (!full || !last) return false;
  const bool in_lane_order = in_lane_order_for(plan, static_cast<int>(std::min(rows, max_rows)));
  const int64_t numbers = in_lane_order ? 0 : 2 * plan.units * plan.parts * kTile;
  float* buffer = scratch.of(numbers);
  const int64_t words = plan.matrix->superblocks * plan.matrix->bits * L * 4;
  const int64_t tiles = std::max<int64_t>(1, kGemvWordBytes / (words * (kTile / L)));
  const int64_t groups = rows > max_rows ? tiles * (kTile / L) : end - begin;
  for (int64_t first = begin; first < end; first += groups) {
    for (int64_t row = 0; row < rows; row += max_rows) {
      const int64_t count = std::min(max_rows, rows - row);
      const char* of[Vector::kMaxRows];
      for (int64_t r = 0; r < Vector::kMaxRows; ++r)
        of[r] = x.data + (row + std::min(r, count - 1)) * x.layout.digit_bytes();
      const int few = static_cast<int>(count);
      const GemvRows some{of, few, Results(y, stride, x.layout.digits, row, few)};
      (count < max_rows ? last : full)(plan, some, first, std::min(end, first + groups), buffer);
    }
  }
  return true;
}

}  // namespace
