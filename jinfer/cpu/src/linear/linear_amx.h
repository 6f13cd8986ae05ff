// Quantized GEMM in AMX tiles over AVX-512's `Vector`: 16 rows of activations times 16 outputs, a
// column at a time.
//
// It adds what multiply_int8() and store_outputs() add, in their order. Their vectors hold a lane
// for each of g columns; here columns come one after the other, so that a column's sums stay in
// registers, and are added up as sum_runs() does. Bits are equal.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"
#include "simd/amx.h"

namespace {

constexpr int kTileRows = 16;             // of activations, and outputs
constexpr int kPanelOfTiles = 256 << 10;  // bytes, in L2

// Rows from which tiles are used, after the sums in docs/kernels.md. Fewer go through
// linear_gemv.h, four or eight at a time.
constexpr int64_t kAmxMinRows = 12;
constexpr int64_t kAmxFewRows = 32;  // for which a block does not wait in L2 until it is used

// In groups of 2 * half lanes: the lower halves of a and b side by side, or the upper ones.
template <int half, bool upper>
inline Vector::I halves_of(Vector::I a, Vector::I b) {
  struct Lanes {
    alignas(64) int32_t from[L];
    constexpr Lanes() : from() {
      for (int lane = 0; lane < L; ++lane) {
        const int in_half = lane & ~half;
        from[lane] = (in_half | (upper ? half : 0)) + (lane & half ? L : 0);
      }
    }
  };
  static constexpr Lanes lanes;
  return _mm512_permutex2var_epi32(a, _mm512_load_si512(lanes.from), b);
}

// Transposes g vectors of 16 / g rows of g columns each into one vector per column.
template <int g, int half = g / 2>
inline void to_columns(Vector::I* v) {
  if constexpr (half > 0) {
    UNROLL
    for (int i = 0; i < g; ++i) {
      if (i & half) continue;
      const Vector::I a = v[i], b = v[i + half];
      v[i] = halves_of<half, false>(a, b);
      v[i + half] = halves_of<half, true>(a, b);
    }
    to_columns<g, half / 2>(v);
  }
}

// Restores the order of outputs after to_columns().
template <int g>
inline Vector::F in_order(Vector::F v) {
  struct Lanes {
    alignas(64) int32_t from[L];
    constexpr Lanes() : from() {
      for (int output = 0; output < L; ++output)
        from[output] = output % (L / g) * g + output / (L / g);
    }
  };
  static constexpr Lanes lanes;
  return _mm512_permutexvar_ps(_mm512_load_si512(lanes.from), v);
}

// 16 decoded outputs, column-major: first all units' first columns.
struct Block {
  uint8_t* codes;  // [g][units][8][16][4], signed unless affine
  float* scales;   // [g][units][parts][16]
  float* bases;    // [g][units][parts][16]
};

// The row groups of a block; the last one repeated.
template <int g>
struct Groups {
  int64_t of[g];
  Groups(int64_t first, int64_t end) {
    for (int i = 0; i < g; ++i) of[i] = std::min(first + i, end - 1);
  }
};

// Words `b` of superblock i of a row group, where those that come later are prefetched.
inline Vector::I load_ahead(const MatmulPlan& plan, int64_t group, int64_t i, int b) {
  const Matrix& m = *plan.matrix;
  const uint32_t* from = m.words + ((group * m.superblocks + i) * m.bits + b) * L;
  __builtin_prefetch(from + kFarPrefetch / 4, 0, 2);
  return Vector::load(from);
}

// Words of superblock i of a block, a vector for each column.
template <int bits, int g>
inline void load_columns(const MatmulPlan& plan, const Groups<g>& groups, int64_t i,
                         Vector::I (&words)[bits][g]) {
  UNROLL
  for (int b = 0; b < bits; ++b) {
    UNROLL
    for (int j = 0; j < g; ++j) words[b][j] = load_ahead(plan, groups.of[j], i, b);
    to_columns<g>(words[b]);
  }
}

template <int bits, int g>
void fill_block_codes(const MatmulPlan& plan, const Groups<g>& groups, uint8_t* codes) {
  constexpr int per_code = per_code_of(bits);
  const Matrix& m = *plan.matrix;
  const int64_t apart = plan.units * 32 * L;  // from one column's to the next one's
  const Vector::I zero = _mm512_set1_epi8(static_cast<char>(m.affine() ? 0 : m.zero));
  for (int64_t i = 0; i < m.superblocks; ++i) {
    Vector::I words[bits][g];
    load_columns(plan, groups, i, words);
    for (int c = 0; c < g; ++c) {
      Vector::I w[bits];
      UNROLL
      for (int b = 0; b < bits; ++b) w[b] = words[b][c];
      uint8_t* to = codes + c * apart + i * per_code * 32 * L;
      decode_steps<bits>(
          w, m.codebook, [&](int half, int s, Vector::I v) __attribute__((always_inline)) {
            Vector::store(to + (8 * half + s) * 4 * L, _mm512_sub_epi8(v, zero));
          });
    }
  }
}

// `buffer`: twice the numbers of a block.
template <int g>
void fill_block(const MatmulPlan& plan, int64_t first, int64_t end, const Block& block,
                float* buffer) {
  using Codes = void (*)(const MatmulPlan&, const Groups<g>&, uint8_t*);
  static constexpr Codes codes[] = {nullptr,
                                    nullptr,
                                    fill_block_codes<2, g>,
                                    fill_block_codes<3, g>,
                                    fill_block_codes<4, g>,
                                    fill_block_codes<5, g>,
                                    fill_block_codes<6, g>,
                                    fill_block_codes<7, g>,
                                    fill_block_codes<8, g>};
  const Matrix& m = *plan.matrix;
  const Groups<g> groups(first, end);
  codes[m.bits](plan, groups, block.codes);
  const int64_t count = plan.units * plan.parts;
  float* of[2] = {buffer, buffer + g * count * L};
  for (int j = 0; j < g; ++j)
    plan.fill(plan, groups.of[j] * m.superblocks * m.R, m.superblocks, of[0] + j * count * L,
              of[1] + j * count * L);
  for (int k = 0; k < (m.affine() ? 2 : 1); ++k) {
    float* to = k ? block.bases : block.scales;
    for (int64_t i = 0; i < count; ++i) {
      Vector::I v[g];
      UNROLL
      for (int j = 0; j < g; ++j) v[j] = Vector::load(of[k] + (j * count + i) * L);
      to_columns<g>(v);
      UNROLL
      for (int c = 0; c < g; ++c) Vector::store(to + (c * count + i) * L, v[c]);
    }
  }
}

// Multiplies 16 rows with a block: to[row] holds 16 outputs in the order of to_columns(). Two sets
// of tiles take turns, so that one product's sums are scaled while the next product is on its way;
// not with eight columns, which have few products each.
template <int g, bool affine, int parts>
void multiply_block(const Block& block, const ActivationLayout& layout, int64_t units,
                    const char* x, Vector::F* to) {
  constexpr int levels = __builtin_ctz(g), steps = 8 / parts;
  const int64_t stride = layout.digit_bytes(), columns = layout.columns, products = units * parts;
  const uint8_t* codes = block.codes;
  alignas(64) int32_t sums[2][kTileRows][L];
  Vector::F kept[levels + 1][kTileRows];
  for (int c = 0; c < g; ++c) {
    const int64_t before = c * products;  // products of other columns
    const auto start = [&](auto set, int64_t i) __attribute__((always_inline)) {
      constexpr int sum = 3 * set.value, a = sum + 1, b = sum + 2;
      const int64_t column = i / parts * g + c, part = i % parts;
      jinfer::tile_zero<sum>();
      jinfer::tile_load<a>(x + 32 * column + 4 * part * steps, stride);
      jinfer::tile_load<b>(codes + (before + i) * steps * 4 * L, 4 * L);
      if constexpr (affine) {
        jinfer::tile_dot_unsigned<sum, a, b>();
      } else {
        jinfer::tile_dot_signed<sum, a, b>();
      }
      jinfer::tile_store<sum>(sums[set.value], 4 * L);
    };
    Vector::F total[kTileRows];
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) total[m] = Vector::zero_f();
    const auto finish = [&](auto set, int64_t i) __attribute__((always_inline)) {
      const int64_t column = i / parts * g + c, part = i % parts;
      const char* scale_of = x + 32 * columns + 4 * column;
      const char* sum_of = scale_of + 4 * (part + 1) * columns;
      const Vector::F scale = Vector::load_f(block.scales + (before + i) * L);
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) {
        float by;
        std::memcpy(&by, scale_of + m * stride, 4);
        const Vector::F both = Vector::mul(scale, Vector::set_f(by));
        total[m] = Vector::fma(Vector::to_float(Vector::load(sums[set.value][m])), both, total[m]);
      }
      if constexpr (affine) {
        const Vector::F base = Vector::load_f(block.bases + (before + i) * L);
#pragma GCC unroll 16
        for (int m = 0; m < kTileRows; ++m) {
          float sum;
          std::memcpy(&sum, sum_of + m * stride, 4);
          total[m] = Vector::fma(base, Vector::set_f(sum), total[m]);
        }
      }
    };
    const std::integral_constant<int, 0> one;
    const std::integral_constant<int, 1> other;
    int64_t i = 0;
    if constexpr (g == 2) {
      start(one, 0);
      for (; i + 2 < products; i += 2) {
        start(other, i + 1);
        finish(one, i);
        start(one, i + 2);
        finish(other, i + 1);
      }
      if (i + 1 < products) start(other, i + 1);
      finish(one, i);
      if (i + 1 < products) finish(other, i + 1);
    } else {
      for (; i < products; ++i) start(one, i), finish(one, i);
    }
    // Neighbours first, as soon as both are complete.
    int level = 0;
    for (; c >> level & 1; ++level)
#pragma GCC unroll 16
      for (int m = 0; m < kTileRows; ++m) total[m] = kept[level][m] + total[m];
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) kept[level][m] = total[m];
  }
  for (int m = 0; m < kTileRows; ++m) to[m] = kept[levels][m];
}

template <int g>
void multiply_amx(const MatmulPlan& plan, const Activations& x, int64_t rows, int64_t begin,
                  int64_t end, float* y, int64_t stride, Scratch& scratch) {
  const Matrix& m = *plan.matrix;
  constexpr int parts = kMostParts<g>;
  const auto multiply =
      m.affine()
          ? (plan.parts == 2 ? multiply_block<g, true, parts> : multiply_block<g, true, 1>)
          : (plan.parts == 2 ? multiply_block<g, false, parts> : multiply_block<g, false, 1>);
  const int64_t code_bytes = plan.units * g * 32 * L, numbers = plan.units * plan.parts * g * L;
  const int64_t block_bytes = code_bytes + 2 * 4 * numbers, row_bytes = x.layout.digit_bytes();
  const int64_t blocks = (end - begin + g - 1) / g;
  const int64_t fit = rows <= kAmxFewRows ? 1 : kPanelOfTiles / block_bytes;
  const int64_t together = std::clamp<int64_t>(fit, 1, blocks);
  // Fewer rows than a tile's are copied; the rest is ignored.
  const int64_t copied = rows < kTileRows ? kTileRows * row_bytes : 0;
  char* memory = scratch.get(together * block_bytes + 2 * 4 * numbers + copied);
  float* buffer = reinterpret_cast<float*>(memory + together * block_bytes);
  const char* from = x.data;
  if (copied) {
    char* copy = reinterpret_cast<char*>(buffer + 2 * numbers);
    std::memcpy(copy, x.data, rows * row_bytes);
    std::memset(copy + rows * row_bytes, 0, copied - rows * row_bytes);
    from = copy;
  }
  const auto block_at = [&](int64_t i) {
    char* at = memory + i * block_bytes;
    float* scales = reinterpret_cast<float*>(at + code_bytes);
    return Block{reinterpret_cast<uint8_t*>(at), scales, scales + numbers};
  };

  jinfer::TileShapes shapes;
  for (int set : {0, 3}) {
    shapes.set(set, kTileRows, 4 * L);
    shapes.set(set + 1, kTileRows, 32 / plan.parts);
    shapes.set(set + 2, 8 / plan.parts, 4 * L);
  }
  const jinfer::Tiles tiles(shapes);
  for (int64_t first = 0; first < blocks; first += together) {
    const int64_t here = std::min(together, blocks - first);
    for (int64_t i = 0; i < here; ++i)
      fill_block<g>(plan, begin + (first + i) * g, end, block_at(i), buffer);
    for (int64_t next = 0, done = 0; next < rows; next += kTileRows, done = next) {
      // Repeats some rows at the end.
      const int64_t row = std::max<int64_t>(0, std::min(next, rows - kTileRows));
      const int here_rows = std::min<int64_t>(kTileRows, rows);
      const Results results(y, stride, x.layout.digits, row, here_rows, done);
      for (int64_t i = 0; i < here; ++i) {
        Vector::F sums[kTileRows];
        multiply(block_at(i), x.layout, plan.units, from + row * row_bytes, sums);
        const int64_t group = begin + (first + i) * g, output = group * (L / g);
        const int64_t left =
            std::min(std::min<int64_t>(g, end - group) * (L / g), m.outputs - output);
        const __mmask16 mask = left >= L ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        for (int r = 0; r < here_rows; ++r) {
          const auto [to, add] = results.of[r];
          if (!to) continue;
          Vector::F sum = in_order<g>(sums[r]);
          if (add) sum = _mm512_maskz_loadu_ps(mask, to + output) + sum;
          _mm512_mask_storeu_ps(to + output, mask, sum);
        }
      }
    }
  }
}

}  // namespace
