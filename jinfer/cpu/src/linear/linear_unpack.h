// Unpacks quantized weights into a panel, over the including file's `Vector`: codes to one byte a
// weight, numbers of blocks to float32. The panel stays in a cache while rows are multiplied with
// it. A *unit* is the extent of a vector of L lanes: 8 steps of 4 codes in every lane, that is G
// columns of L / G rows. A *row group* is these rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/scratch.h"
#include "linear/linear.h"
#include "simd/simd.h"

// Unrolls loops over registers at any level of optimization.
#ifndef UNROLL
#define UNROLL _Pragma("GCC unroll 8")
#endif

namespace {

using jinfer::ActivationLayout;
using jinfer::Activations;
using jinfer::kThreeAndAHalf;
using jinfer::Matrix;
using jinfer::per_code_of;
using jinfer::Piece;
using jinfer::Pieces;
using jinfer::pieces;
using jinfer::Scratch;

constexpr int L = Vector::L;
constexpr int kTile = 16;  // words of a superblock's row of codes: R * G

// Keeps compilers from loading a vector again for each use.
inline Vector::I once(Vector::I v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Parts of a column, in superblocks of g: two-level formats (g = 8) may have blocks of 16.
template <int g>
constexpr int kMostParts = g == 8 ? 2 : 1;

// Where products of digit rows are stored. A row's digits are added up in order.
struct Results {
  struct Row {
    float* y;  // null: stored already
    bool add;
  };
  static constexpr int kMost = 16;
  Row of[kMost];

  // For rows `first` .. `first` + `count` - 1, of which those before `done` are stored already.
  Results(float* y, int64_t stride, int digits, int64_t first, int count, int64_t done = 0) {
    for (int r = 0; r < count; ++r) {
      const int64_t row = first + r;
      of[r] = {row < done ? nullptr : y + row / digits * stride, row % digits != 0};
    }
  }
};

// Stores sums over runs of g lanes, a row's outputs from `output` on.
template <int g>
inline void store_sums(Vector::F v, const Results::Row& row, int64_t output, int64_t outputs) {
  constexpr int many = L / g;
  if (!row.y) return;
  if (output + many <= outputs && !row.add) return Vector::sum_runs<g>(v, row.y + output);
  float all[many];
  Vector::sum_runs<g>(v, all);
  for (int i = 0; i < many && output + i < outputs; ++i)
    row.y[output + i] = row.add ? row.y[output + i] + all[i] : all[i];
}

// The same for two vectors, whose outputs are neighbours.
template <int g>
inline void store_sums(Vector::F a, Vector::F b, const Results::Row& row, int64_t output,
                       int64_t outputs) {
  if constexpr (L == kTile) {
    const bool whole = output + 2 * (L / g) <= outputs;
    if (row.y && whole && !row.add) return Vector::sum_runs<g>(a, b, row.y + output);
  }
  store_sums<g>(a, row, output, outputs);
  store_sums<g>(b, row, output + L / g, outputs);
}

// ---- codes ------------------------------------------------------------------------------------

template <int bits, int s, int piece = 0>
inline Vector::I unpack_four(const Vector::I* words) {
  constexpr Pieces all = pieces(bits, s);
  constexpr Piece p = all.of[piece];
  constexpr uint32_t mask = ((1u << p.width) - 1) << p.at;
  Vector::I v = words[p.byte];
  if constexpr (p.low >= p.at) {
    v = Vector::shift_right<(p.low >= p.at ? p.low - p.at : 0)>(v);
  } else {
    v = Vector::shift_left<(p.low < p.at ? p.at - p.low : 0)>(v);
  }
  constexpr bool alone = Vector::kByteShifts && p.low + p.width == 8 && p.at == 0;
  constexpr bool whole =
      bits == 8 || (bits == kThreeAndAHalf && s < bits && Vector::kSplitsSevenBits);
  if constexpr (!whole && !alone) v = Vector::bit_and(v, mask * 0x01010101u);
  if constexpr (piece + 1 < all.count)
    v = Vector::bit_or(v, unpack_four<bits, s, piece + 1>(words));
  return v;
}

// The largest code as a byte operand of dot products.
constexpr int max_code(int bits, bool coded) {
  return coded ? 255 : bits == kThreeAndAHalf ? 127 / 11 : (1 << bits) - 1;
}

// Calls put(half, s, codes) for steps s = 0 .. 7 of a unit's words; 3.5 bits: for two units, half 0
// with x and half 1 with y.
template <int bits, class Put>
inline __attribute__((always_inline)) void decode_steps(const Vector::I* w, const uint8_t* codebook,
                                                        Put put) {
  const auto step = [&](int s, Vector::I v) __attribute__((always_inline)) {
    if constexpr (bits == kThreeAndAHalf) {
      Vector::I x, y;
      Vector::split_pairs(v, x, y);
      put(0, s, x);
      put(1, s, y);
    } else {
      if constexpr (bits <= 4) {
        if (codebook) v = Vector::lookup(codebook, v);
      }
      put(0, s, v);
    }
  };
  step(0, unpack_four<bits, 0>(w));
  step(1, unpack_four<bits, 1>(w));
  step(2, unpack_four<bits, 2>(w));
  step(3, unpack_four<bits, 3>(w));
  step(4, unpack_four<bits, 4>(w));
  step(5, unpack_four<bits, 5>(w));
  step(6, unpack_four<bits, 6>(w));
  step(7, unpack_four<bits, 7>(w));
}

// Decodes a unit's `words`, `stride` apart, to codes[8][L]; 3.5 bits: two units, `codes` with x and
// `second` with y.
template <int bits>
inline void decode(const uint32_t* words, int64_t stride, const uint8_t* codebook, uint8_t* codes,
                   uint8_t* second) {
  Vector::I w[bits];
  UNROLL
  for (int b = 0; b < bits; ++b) {
    w[b] = Vector::load(words + b * stride);
    __builtin_prefetch(words + b * stride + 1024);
  }
  decode_steps<bits>(w, codebook, [&](int half, int s, Vector::I v) {
    Vector::store((half ? second : codes) + s * 4 * L, v);
  });
}

// ---- numbers ----------------------------------------------------------------------------------

// Index of each lane's number within a row group, for one number of a code and one half of a
// column: at[lane], and at[16 + lane] for bases.
struct GatherIndices {
  uint16_t at[32];
  int count;  // numbers that a vector needs
};

// For blocks of `block` inputs.
GatherIndices gather_indices(const Matrix& matrix, int block, int half, int part) {
  GatherIndices out;
  const int rows = L / matrix.G, per_row = std::max(1, matrix.width() / block);
  for (int lane = 0; lane < 16; ++lane) {
    const int input = (half * matrix.G + lane % matrix.G) * 32 + part * 16;
    const int at = lane < L ? lane / matrix.G * per_row + input / block : 0;
    out.at[lane] = at * matrix.numbers;
    out.at[16 + lane] = at * matrix.numbers + 1;
  }
  out.count = rows * per_row * matrix.numbers;
  return out;
}

inline __attribute__((always_inline)) void gather(const void* p, bool bytes,
                                                  const GatherIndices& places, bool both,
                                                  Vector::F& first, Vector::F& second) {
  if (Vector::gather(p, bytes, places.count, places.at, both, first, second)) return;
  float values[2 * L];
  for (int k = 0; k < (both ? 2 : 1); ++k) {
    for (int lane = 0; lane < L; ++lane) {
      const int at = places.at[16 * k + lane];
      values[k * L + lane] = bytes ? static_cast<const int8_t*>(p)[at]
                                   : jinfer::from_f16(static_cast<const uint16_t*>(p)[at]);
    }
  }
  first = Vector::load_f(values);
  if (both) second = Vector::load_f(values + L);
}

// ---- panels -----------------------------------------------------------------------------------

// Constants of a call.
struct MatmulPlan {
  const Matrix* matrix = nullptr;
  // Writes scales and bases of a row group, float32 [units][parts][L]; `row`: superblock rows
  // before it.
  void (*fill)(const MatmulPlan&, int64_t row, int64_t superblocks, float* scales,
               float* bases) = nullptr;
  // Numbers are stored in lane order, or can be loaded into it.
  bool in_lane_order = false;
  int rows, parts;
  int64_t units;
  // For each part of a superblock's units: indices into a row group's numbers.
  struct Numbers {
    GatherIndices blocks, steps;
  } numbers[4];

  MatmulPlan() = default;
  explicit MatmulPlan(const Matrix& m)
      : rows(L / m.G), parts(m.block == 16 ? 2 : 1), key{m.R,     m.G,       m.per_code,
                                                         m.block, m.numbers, m.steps != nullptr} {
    for (int half = 0; half < m.per_code; ++half) {
      for (int part = 0; part < parts; ++part) {
        Numbers& out = numbers[half * parts + part];
        out.blocks = gather_indices(m, m.block, half, part);
        if (m.steps) out.steps = gather_indices(m, 256, half, part);
      }
    }
  }

  int key[6] = {};  // determines all but `matrix` and its dependents
};

// Targets of `MatmulPlan::fill`.
template <bool affine, bool two_level>
void fill_numbers(const MatmulPlan& plan, int64_t row, int64_t superblocks, float* scales,
                  float* bases) {
  const Matrix& m = *plan.matrix;
  const int count = m.per_code * plan.parts;
  const int per_row = m.numbers * std::max(1, m.width() / m.block), shared = m.shared();
  const int steps_per_row = m.numbers * m.G * m.per_code / 8;
  const int64_t in_tile = row % m.R, first = row / m.R;
  int64_t at = (first / shared * m.R + in_tile) * per_row, step_at = row * steps_per_row;
  int64_t left = shared - first % shared;  // superblocks that still share these numbers
  for (int64_t i = 0; i < superblocks; ++i) {
    for (int k = 0; k < count; ++k) {
      const MatmulPlan::Numbers& numbers = plan.numbers[k];
      Vector::F scale, base;
      if constexpr (two_level) {
        Vector::F step, floor;
        gather(static_cast<const int8_t*>(m.scales) + at, true, numbers.blocks, affine, scale,
               base);
        gather(m.steps + step_at, false, numbers.steps, affine, step, floor);
        scale = Vector::mul(scale, step);
        if (affine) base = Vector::mul(base, floor);
      } else {
        gather(static_cast<const uint16_t*>(m.scales) + at, false, numbers.blocks, affine, scale,
               base);
      }
      Vector::store_f(scales, scale);
      if (affine) Vector::store_f(bases, base);
      scales += L;
      bases += L;
    }
    step_at += m.R * steps_per_row;
    if (--left == 0) at += m.R * per_row, left = shared;
  }
}

// The same for blocks that span all columns of a superblock's row, or several superblocks, with one
// weight per code.
template <bool affine, class V = Vector>
void fill_repeated(const MatmulPlan& plan, int64_t row, int64_t superblocks, float* scales,
                   float* bases) {
  if constexpr (V::kRepeated) {
    const Matrix& m = *plan.matrix;
    const int64_t first = row / m.R, shared = m.shared();
    const auto* numbers = static_cast<const uint16_t*>(m.scales);
    numbers += (first / shared * m.R + row % m.R) * m.numbers;
    for (int64_t i = 0, left = shared - first % shared; i < superblocks; left = shared) {
      Vector::F scale, base;
      V::template load_repeated<affine>(numbers, scale, base);
      for (; left > 0 && i < superblocks; --left, ++i, scales += L, bases += L) {
        Vector::store_f(scales, scale);
        if (affine) Vector::store_f(bases, base);
      }
      numbers += m.R * m.numbers;
    }
  }
}

// The thread's last plan is reused: chunks and calls are mostly alike.
const MatmulPlan& plan_of(const Matrix& m) {
  static thread_local MatmulPlan plan;
  const int key[] = {m.R, m.G, m.per_code, m.block, m.numbers, m.steps != nullptr};
  if (std::memcmp(key, plan.key, sizeof key) != 0) plan = MatmulPlan(m);
  plan.matrix = &m;
  plan.in_lane_order =
      m.steps ? Vector::kTwoLevel : m.block == 32 && (m.per_code == 1 || Vector::kMaxPairRows > 0);
  plan.fill = m.affine() ? (m.steps ? fill_numbers<true, true> : fill_numbers<true, false>)
                         : (m.steps ? fill_numbers<false, true> : fill_numbers<false, false>);
  if (Vector::kRepeated && !m.steps && m.per_code == 1 && m.block >= m.width())
    plan.fill = m.affine() ? fill_repeated<true> : fill_repeated<false>;
  plan.units = m.superblocks * m.per_code;
  return plan;
}

// Decoded units of some row groups.
struct Panel {
  uint8_t* codes;  // [groups][units][8][L][4]
  float* scales;   // [groups][units][parts][L]
  float* bases;    // [groups][units][parts][L]
};

template <int bits>
void fill_codes(const MatmulPlan& plan, const uint32_t* words, int64_t superblocks,
                uint8_t* codes) {
  const Matrix& m = *plan.matrix;
  const int64_t lanes = int64_t{m.R} * m.G;
  constexpr int64_t unit = 32 * L;
  for (int64_t i = 0; i < superblocks; ++i) {
    decode<bits>(words, lanes, m.codebook, codes, codes + unit);
    words += bits * lanes;
    codes += m.per_code * unit;
  }
}

// Decodes row groups `group` .. `group` + `groups` - 1.
void fill(const MatmulPlan& plan, int64_t group, int64_t groups, const Panel& panel) {
  using Codes = void (*)(const MatmulPlan&, const uint32_t*, int64_t, uint8_t*);
  static constexpr Codes codes[] = {nullptr,       nullptr,       fill_codes<2>,
                                    fill_codes<3>, fill_codes<4>, fill_codes<5>,
                                    fill_codes<6>, fill_codes<7>, fill_codes<8>};
  const Matrix& m = *plan.matrix;
  // Tiles of a single group are contiguous.
  const int64_t together = m.R == plan.rows ? groups : 1;
  const int64_t units = plan.units, count = units * plan.parts * L;
  for (int64_t i = 0; i < groups; i += together) {
    const int64_t tile = (group + i) * plan.rows / m.R, row = (group + i) * plan.rows % m.R;
    const int64_t superblock = tile * m.superblocks, superblocks = together * m.superblocks;
    const uint32_t* words = m.words + (superblock * m.bits * m.R + row) * m.G;
    codes[m.bits](plan, words, superblocks, panel.codes + i * units * 32 * L);
    plan.fill(plan, superblock * m.R + row, superblocks, panel.scales + i * count,
              panel.bases + i * count);
  }
}

}  // namespace
