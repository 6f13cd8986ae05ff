// Matmul of bfloat16 in AMX tiles: the weights of 16 outputs, as stored, times up to 16 rows of
// activations.
//
// One row takes the same path as many, so that bits are equal: for every 32 inputs, products of
// even and of odd inputs are added up separately, in order, and their sum is added to the total;
// dense_bf16_avx512bf16.cc adds in the same order.
#include <algorithm>
#include <cstring>

#include "common/scratch.h"
#include "dense/dense.h"
#include "simd/amx.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

constexpr int64_t OUTPUTS = 16, ROWS = 16;  // of a tile
constexpr int64_t DEPTH = 32;               // inputs
constexpr int64_t OUTPUT_BLOCK = 64;        // outputs that stay in a cache while rows are processed
constexpr int64_t AHEAD = 24 << 10;         // prefetch distance in bytes

// Pairs of a packed row.
int64_t pairs_of(int64_t inputs) { return (inputs + DEPTH - 1) / DEPTH * DEPTH / 2; }

// Rows in the block of row `row`: 16, but for the last block.
int64_t width_of(int64_t row, int64_t rows) { return std::min(ROWS, rows - row / ROWS * ROWS); }

// Packs pairs of 16 rows side by side, as a tile's columns. Rounds to nearest even; denormals
// become 0.
void pack(const float* x, int64_t inputs, int64_t row, int64_t rows, float* all) {
  const int64_t pairs = pairs_of(inputs), width = width_of(row, rows);
  float* to = all + row / ROWS * ROWS * pairs + row % ROWS;
  for (int64_t i = 0; i < pairs; i += LANES) {
    const int64_t from = 2 * i;
    const Floats low = load_padded(x + from, inputs - from);
    const Floats high = load_padded(x + from + LANES, inputs - from - LANES);
    float both[LANES];
    const auto rounded = _mm512_cvtne2ps_pbh(high, low);
    memcpy(both, &rounded, sizeof both);
    for (int lane = 0; lane < LANES; ++lane) memcpy(to + (i + lane) * width, both + lane, 4);
  }
}

// Tiles of weights: 16 rows in place, or copied if fewer or not whole.
struct Weights {
  const char* data;
  int64_t stride;  // bytes
};

// `buffer`: pairs, for a copy.
Weights weights_at(const DenseMatrix& w, int64_t output, float* buffer) {
  const char* from = static_cast<const char*>(w.data) + 2 * output * w.inputs;
  if (output + OUTPUTS <= w.outputs && w.inputs % DEPTH == 0) return {from, 2 * w.inputs};
  const int64_t stride = 4 * pairs_of(w.inputs), count = std::min(OUTPUTS, w.outputs - output);
  char* copy = reinterpret_cast<char*>(buffer);
  memset(copy, 0, OUTPUTS * stride);
  for (int64_t n = 0; n < count; ++n)
    memcpy(copy + n * stride, from + 2 * n * w.inputs, 2 * w.inputs);
  return {copy, stride};
}

// sums[o * 2 + i][output][row] for O times 16 outputs and I times 16 rows, `width` of each in use.
template <int O, int I>
void multiply_tiles(const Weights* w, const float* const* x, int64_t pairs, int64_t width,
                    float (*sums)[OUTPUTS][ROWS]) {
  tile_zero<0>();
  if (I > 1) tile_zero<1>();
  if (O > 1) tile_zero<2>();
  if (O > 1 && I > 1) tile_zero<3>();
  const char* ahead = w[0].data + AHEAD;
  for (int64_t i = 0; i < pairs; i += DEPTH / 2) {
    if (I == 1)  // more rows are compute-bound
      for (int line = 0; line < O * OUTPUTS; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    tile_load<4>(w[0].data + 4 * i, w[0].stride);
    tile_load<6>(x[0] + i * width, 4 * width);
    tile_dot_bfloat<0, 4, 6>();
    if constexpr (I > 1) {
      tile_load<7>(x[1] + i * width, 4 * width);
      tile_dot_bfloat<1, 4, 7>();
    }
    if constexpr (O > 1) {
      tile_load<5>(w[1].data + 4 * i, w[1].stride);
      tile_dot_bfloat<2, 5, 6>();
    }
    if constexpr (O > 1 && I > 1) tile_dot_bfloat<3, 5, 7>();
  }
  tile_store<0>(sums[0], 4 * ROWS);
  if (I > 1) tile_store<1>(sums[1], 4 * ROWS);
  if (O > 1) tile_store<2>(sums[2], 4 * ROWS);
  if (O > 1 && I > 1) tile_store<3>(sums[3], 4 * ROWS);
}

// Stores rows from .. to - 1 of a tile, and the first `count` outputs.
void put(const float (*sums)[ROWS], int64_t from, int64_t to, int64_t count, float* y,
         int64_t stride) {
  static_assert(LANES == OUTPUTS && LANES == ROWS);
  if (to == 1) {
    for (int64_t n = 0; n < count; ++n) y[n] = sums[n][0];
    return;
  }
  Floats lanes[LANES];
  for (int n = 0; n < LANES; ++n) lanes[n] = load(sums[n]);
  transpose(lanes);
  for (int64_t row = from; row < to; ++row) memcpy(y + row * stride, &lanes[row], 4 * count);
}

void multiply(const DenseMatrix& w, const float* x, int64_t rows, int64_t first, int64_t count,
              int64_t begin, int64_t end, float* y, int64_t stride) {
  static thread_local Scratch scratch;
  const int64_t pairs = pairs_of(w.inputs), last = first + count;
  float* copies = scratch.of(OUTPUT_BLOCK * pairs);
  alignas(64) float sums[4][OUTPUTS][ROWS];
  const auto tiles_of = [&](int64_t width) {
    TileShapes shapes;
    for (int tile : {0, 1, 2, 3, 6, 7}) shapes.set(tile, 16, 4 * width);
    for (int tile : {4, 5}) shapes.set(tile, OUTPUTS, 2 * DEPTH);
    return shapes;
  };
  for (int64_t output_block = begin; output_block < end; output_block += OUTPUT_BLOCK) {
    Weights weights[OUTPUT_BLOCK / OUTPUTS];
    const int64_t tiles = (std::min(OUTPUT_BLOCK, end - output_block) + OUTPUTS - 1) / OUTPUTS;
    for (int64_t o = 0; o < tiles; ++o)
      weights[o] = weights_at(w, output_block + o * OUTPUTS, copies + o * OUTPUTS * pairs);
    for (int64_t row = first / ROWS * ROWS; row < last;) {
      const int64_t width = width_of(row, rows);
      const Tiles configured(tiles_of(width));
      for (; row < last && width_of(row, rows) == width;) {
        const int64_t adjacent = row + ROWS < last && width_of(row + ROWS, rows) == width ? 2 : 1;
        const float* of[2] = {x + row * pairs, x + (row + ROWS) * pairs};
        for (int64_t o = 0; o < tiles; o += 2) {
          const int64_t below = std::min<int64_t>(2, tiles - o);
          const auto multiply = below > 1
                                    ? (adjacent > 1 ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                                    : (adjacent > 1 ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
          multiply(weights + o, of, pairs, width, sums);
          for (int64_t k = 0; k < below; ++k) {
            const int64_t output = output_block + (o + k) * OUTPUTS;
            for (int64_t i = 0; i < adjacent; ++i) {
              const int64_t at = row + i * ROWS;  // the tile's first row
              put(sums[2 * k + i], std::max<int64_t>(first - at, 0), std::min(width, last - at),
                  std::min(OUTPUTS, end - output), y + (at - first) * stride + output, stride);
            }
          }
        }
        row += adjacent * ROWS;
      }
    }
  }
}

const DenseBf16Tiles tiles{OUTPUTS, false, pairs_of, pack, multiply};

}  // namespace
}  // namespace jinfer

const jinfer::DenseBf16Tiles* jinfer::dense_bf16_amx() { return &jinfer::tiles; }
