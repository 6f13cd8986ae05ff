// Matmul with 16-bit codes (F16 weights as integers), over the including file's `Vector`: two
// weights of a word times two activations of 14 bits. Codes need no decoding and are used from
// memory for any number of rows.
//
// Sums of a column's 32 products are exact in 32 bits: codes are at most 2^13 in magnitude,
// activations kInt16Limit. They are scaled and added up in order, to the same bits for any number
// of rows.
#pragma once

#include <algorithm>

#include "linear/linear_unpack.h"

namespace {

constexpr int kInt16Bits = 16, kInt16Columns = 2;
constexpr int kInt16Tile = 16;         // words of a superblock's row of codes: R * G
constexpr float kInt16Limit = 8191;    // largest activation
constexpr int kInt16Adjacent = 4;      // most tiles side by side
constexpr int64_t kInt16Ahead = 4096;  // prefetch distance in bytes

// Rows `first` .. `first` + `count` - 1; a kernel that takes more repeats the last one.
struct Int16Rows {
  const char* x;
  int64_t stride;
  int count;
  Results results;
  int64_t ahead;  // prefetch distance in bytes; 0: none
};

// Multiplies with `tiles` tiles side by side, given their scales.
template <int count, int tiles, bool fetch>
void multiply_int16_tiles(const MatmulPlan& plan, const Int16Rows& rows, int64_t tile,
                          const float* scales) {
  constexpr int g = kInt16Columns, height = L / g, of_tile = kInt16Tile / L,
                vectors = tiles * of_tile;
  constexpr int64_t record = ActivationLayout::int16_bytes() * g, step = kInt16Bits * kInt16Tile;
  const Matrix& m = *plan.matrix;
  const int64_t superblocks = m.superblocks, stride = superblocks * L, apart = superblocks * step;
  const char* x[count];
  for (int r = 0; r < count; ++r) x[r] = rows.x + std::min(r, rows.count - 1) * rows.stride;
  const uint32_t* words = m.words + tile * apart;
  const int64_t ahead = rows.ahead / 4;
  // In memory: registers only hold the sums.
  alignas(64) float total[vectors][count][L] = {};
  for (int64_t u = 0; u < superblocks; ++u, words += step) {
    const int64_t at = u * record;
    Vector::I sum[vectors][count];
    UNROLL
    for (int v = 0; v < vectors; ++v) {
      UNROLL
      for (int r = 0; r < count; ++r) sum[v][r] = Vector::zero();
    }
#pragma GCC unroll 16
    for (int s = 0; s < kInt16Bits; ++s) {
      Vector::I w[vectors];
      UNROLL
      for (int v = 0; v < vectors; ++v)
        w[v] = Vector::load(words + v / of_tile * apart + s * kInt16Tile + v % of_tile * L);
      if (fetch) __builtin_prefetch(words + s * kInt16Tile + ahead, 0, 2);
      UNROLL
      for (int r = 0; r < count; ++r) {
        const Vector::I by = Vector::repeat<g>(x[r] + at + 4 * g * s);
        UNROLL
        for (int v = 0; v < vectors; ++v) Vector::dot_int16(sum[v][r], w[v], by);
      }
    }
    UNROLL
    for (int v = 0; v < vectors; ++v) {
      const Vector::F scale = Vector::load_f(scales + v * stride + u * L);
      UNROLL
      for (int r = 0; r < count; ++r) {
        const Vector::F by = Vector::repeat_f<g>(x[r] + at + 64 * g);
        const Vector::F before = Vector::load_f(total[v][r]);
        Vector::store_f(total[v][r],
                        Vector::fma(Vector::to_float(sum[v][r]), Vector::mul(scale, by), before));
      }
    }
    asm volatile("" : : "r"(total) : "memory");
  }
  for (int v = 0; v < vectors; ++v) {
    for (int r = 0; r < rows.count; ++r)
      store_sums<g>(Vector::load_f(total[v][r]), rows.results.of[r], (tile * of_tile + v) * height,
                    m.outputs);
  }
}

// Multiplies with tiles begin .. end - 1, given their scales. One or two rows are memory-bound, and
// stream faster from several tiles at once.
template <int count>
void multiply_int16_rows(const MatmulPlan& plan, const Int16Rows& rows, int64_t begin, int64_t end,
                         const float* scales) {
  constexpr int adjacent = count <= 2 ? kInt16Adjacent / count : 1;
  const auto multiply = count > 2 && rows.ahead ? multiply_int16_tiles<count, 1, (count > 2)>
                                                : multiply_int16_tiles<count, 1, false>;
  const int64_t each = plan.matrix->superblocks * kInt16Tile;
  int64_t tile = begin;
  for (; adjacent > 1 && tile + adjacent <= end; tile += adjacent, scales += adjacent * each)
    multiply_int16_tiles<count, adjacent, false>(plan, rows, tile, scales);
  for (; tile < end; ++tile, scales += each) multiply(plan, rows, tile, scales);
}

using Int16Kernel = void (*)(const MatmulPlan&, const Int16Rows&, int64_t, int64_t, const float*);

// The kernel for so many rows, or slightly more.
Int16Kernel int16_kernel_for(int64_t rows) {
  if (rows == 1) return multiply_int16_rows<1>;
  if (rows == 2) return multiply_int16_rows<2>;
  if constexpr (Vector::kMaxRows == 8) {
    if (rows > 4) return multiply_int16_rows<8>;
  }
  return rows == 3 ? multiply_int16_rows<3> : multiply_int16_rows<4>;
}

// Bytes of words that stay in a cache while rows are processed.
constexpr int64_t kInt16Words = 96 << 10;

// The scales of tiles begin .. end - 1, float32 [tiles][vectors of a tile][superblocks][L].
void fill_int16_scales(const MatmulPlan& plan, int64_t begin, int64_t end, float* scales) {
  const Matrix& m = *plan.matrix;
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int row = 0; row < m.R; row += plan.rows, scales += m.superblocks * L)
      plan.fill(plan, tile * m.superblocks * m.R + row, m.superblocks, scales, scales);
  }
}

// Multiplies with row groups begin .. end - 1, which are whole tiles.
void multiply_int16(const MatmulPlan& plan, const Activations& x, int64_t rows, int64_t begin,
                    int64_t end, float* y, int64_t stride, Scratch& scratch) {
  constexpr int64_t max_rows = Vector::kMaxRows, of_tile = kInt16Tile / L;
  const int64_t superblocks = plan.matrix->superblocks, row_bytes = x.layout.digit_bytes();
  const int64_t tile_bytes = std::max<int64_t>(1, superblocks) * kInt16Bits * kInt16Tile * 4;
  begin /= of_tile, end /= of_tile;
  int64_t tiles = std::max<int64_t>(rows <= 2 ? kInt16Adjacent : 1, kInt16Words / tile_bytes);
  if (tiles > kInt16Adjacent) tiles -= tiles % kInt16Adjacent;
  float* scales = scratch.of(tiles * superblocks * kInt16Tile);
  for (int64_t first = begin; first < end; first += tiles) {
    const int64_t last = std::min(end, first + tiles);
    fill_int16_scales(plan, first, last, scales);
    for (int64_t row = 0; row < rows; row += max_rows) {
      const int count = static_cast<int>(std::min(max_rows, rows - row));
      // A block of tiles is fetched with its first rows, and the next one with the last rows.
      const bool is_last = row + max_rows >= rows && last + tiles <= end;
      const int64_t ahead = row == 0 ? kInt16Ahead : is_last ? tiles * tile_bytes : 0;
      const Int16Rows some{x.data + row * row_bytes, row_bytes, count,
                           Results(y, stride, 1, row, count), ahead};
      int16_kernel_for(count)(plan, some, first, last, scales);
    }
  }
}

}  // namespace
