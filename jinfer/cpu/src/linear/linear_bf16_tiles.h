// Quantized GEMM in AMX tiles of bfloat16, for many rows: panels of weights, with scales and bases,
// are decoded once to a tile's columns; then tiles alone are loaded, multiplied and stored.
//
// Bits are those of a bfloat16 matrix (dense_bf16_amx.cc), not of the kernels of bytes.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "linear/linear_amx.h"

namespace {

// Rows from which these tiles are used: batches of up to 32 sequences keep the bits of bytes.
constexpr int64_t kBf16MinRows = 33;
constexpr int64_t kBf16Tile = 1 << 10;        // bytes: 32 inputs of 16 outputs
constexpr int64_t kBf16Panel = 512 << 10;     // bytes of decoded weights, in L2
constexpr int64_t kBf16RowBytes = 512 << 10;  // of activations, in L2 while a panel passes
constexpr int64_t kBf16Piece = 20;            // columns of 32 outputs that stay in L1
constexpr int64_t kTwoTiles = 2 * kTileRows;

// Rounds a row to nearest even; denormals become 0.
void prepare_bf16(const float* x, int64_t inputs, const ActivationLayout& layout, char* row) {
  for (int64_t i = 0; i < layout.columns * 32; i += 32, row += 64) {
    const auto part = [&](int64_t at) {
      const int64_t left = inputs - at;
      const __mmask16 mask = left >= L ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
      return _mm512_maskz_loadu_ps(mask, x + at);
    };
    Vector::store(row, (__m512i)_mm512_cvtne2ps_pbh(part(i + L), part(i)));
  }
}

// A pair of inputs is a word of a tile's row, and the words of 16 outputs come from two vectors of
// floats: of outputs 0 .. 7 and of 8 .. 15. So that these can be taken from each 128 bits of codes,
// their words are in the order 0, 1, 8, 9, 2, 3, 10, 11, ...
template <int g>
struct Bf16Order {
  alignas(64) int32_t words[L], halves[2][L];  // source lanes, after to_columns()
  constexpr Bf16Order() : words(), halves() {
    const auto lane_of = [](int output) { return output % (L / g) * g + output / (L / g); };
    for (int lane = 0; lane < L; ++lane) {
      words[lane] = lane_of(lane % 4 / 2 * 8 + lane / 4 * 2 + lane % 2);
      for (int half : {0, 1}) halves[half][lane] = lane_of(half * 8 + lane / 2);
    }
  }
};

// Bytes of codes, [pair][half], as numbers of 32 bits: pairs of inputs of eight outputs.
struct Bf16Bytes {
  alignas(64) uint8_t of[2][2][4 * L];
  constexpr Bf16Bytes() : of() {
    for (int pair : {0, 1})
      for (int half : {0, 1})
        for (int i = 0; i < 4 * L; ++i) {
          const int number = i % 16 / 4;
          of[pair][half][i] = i % 4 ? 0x80 : 4 * (2 * half + number / 2) + 2 * pair + number % 2;
        }
  }
};

// Decodes 16 outputs to tiles, one per column of 32 inputs: [16 pairs][16 outputs][2].
// `buffer`: twice the numbers of a block.
template <int bits, int g, int parts>
void fill_bf16(const MatmulPlan& plan, const Groups<g>& groups, const float* buffer, char* to) {
  static constexpr Bf16Order<g> order;
  static constexpr Bf16Bytes bytes;
  constexpr int numbers = per_code_of(bits) * parts;
  const Matrix& m = *plan.matrix;
  const int64_t count = plan.units * parts, all = g * count * L;
  const Vector::F minus_zero = Vector::set_f(-m.zero);
  const auto permuted = [](const int32_t* from, Vector::F v) {
    return _mm512_permutexvar_ps(_mm512_load_si512(from), v);
  };
  for (int64_t i = 0; i < m.superblocks; ++i) {
    Vector::I words[bits][g];
    load_columns(plan, groups, i, words);
    Vector::I both[2][numbers][g];  // scales and bases
    UNROLL
    for (int k = 0; k < 2; ++k) {
      if (k == 1 && !m.affine()) break;
      UNROLL
      for (int n = 0; n < numbers; ++n) {
        UNROLL
        for (int j = 0; j < g; ++j)
          both[k][n][j] = Vector::load(buffer + k * all + (j * count + i * numbers + n) * L);
        to_columns<g>(both[k][n]);
      }
    }
    for (int c = 0; c < g; ++c) {
      Vector::I w[bits];
      UNROLL
      for (int b = 0; b < bits; ++b)
        w[b] = _mm512_permutexvar_epi32(_mm512_load_si512(order.words), words[b][c]);
      Vector::F scale[numbers][2], base[numbers][2];
      UNROLL
      for (int n = 0; n < numbers; ++n) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
          const int32_t* from = order.halves[half];
          scale[n][half] = permuted(from, (Vector::F)both[0][n][c]);
          base[n][half] = m.affine() ? permuted(from, (Vector::F)both[1][n][c])
                                     : Vector::mul(minus_zero, scale[n][half]);
        }
      }
      char* tile = to + (i * per_code_of(bits) * g + c) * kBf16Tile;
      decode_steps<bits>(
          w, m.codebook, [&](int second, int s, Vector::I codes) __attribute__((always_inline)) {
            const int n = second * parts + (parts == 2 ? s / 4 : 0);
            UNROLL
            for (int pair = 0; pair < 2; ++pair) {
              const auto half = [&](int h) __attribute__((always_inline)) {
                const Vector::I from = _mm512_load_si512(bytes.of[pair][h]);
                const Vector::F value = Vector::to_float(_mm512_shuffle_epi8(codes, from));
                return Vector::fma(value, scale[n][h], base[n][h]);
              };
              Vector::store(tile + second * g * kBf16Tile + (2 * s + pair) * 4 * L,
                            (__m512i)_mm512_cvtne2ps_pbh(half(1), half(0)));
            }
          });
    }
  }
}

template <int g>
using FillBf16 = void (*)(const MatmulPlan&, const Groups<g>&, const float*, char*);

template <int bits, int g, int parts>
constexpr FillBf16<g> fill_bf16_of() {
  if constexpr (g == 2 || bits <= 6) return fill_bf16<bits, g, parts>;
  return nullptr;  // two-level codes have 6 bits at most
}

template <int g, int parts>
void fill_bf16_block(const MatmulPlan& plan, int64_t first, int64_t end, float* buffer, char* to) {
  const Matrix& m = *plan.matrix;
  const Groups<g> groups(first, end);
  const int64_t count = plan.units * parts * L;
  for (int j = 0; j < g; ++j)
    plan.fill(plan, groups.of[j] * m.superblocks * m.R, m.superblocks, buffer + j * count,
              buffer + (g + j) * count);
  static constexpr FillBf16<g> fills[] = {nullptr,
                                          nullptr,
                                          fill_bf16_of<2, g, parts>(),
                                          fill_bf16_of<3, g, parts>(),
                                          fill_bf16_of<4, g, parts>(),
                                          fill_bf16_of<5, g, parts>(),
                                          fill_bf16_of<6, g, parts>(),
                                          fill_bf16_of<7, g, parts>(),
                                          fill_bf16_of<8, g, parts>()};
  fills[m.bits](plan, groups, buffer, to);
}

// Operands of a product of I tiles of rows and O tiles of outputs.
struct Bf16Operands {
  const char* x;
  int64_t x_stride;  // bytes
  const char* w;
  int64_t w_apart;  // bytes to the next 16 outputs
  int64_t columns;
  bool add;  // to y
  float* y;
  int64_t y_stride;  // bytes
};

template <int O, int I>
void multiply_bf16_tiles(const Bf16Operands& o) {
  const int64_t x_stride = o.x_stride;  // in a register, even if a tile's load clobbers memory
  const auto of_y = [&](int i, int n) {
    return reinterpret_cast<char*>(o.y + n * L) + i * kTileRows * o.y_stride;
  };
  const auto begin = [&](auto tile, int i, int n) __attribute__((always_inline)) {
    if (o.add) {
      jinfer::tile_load<tile.value>(of_y(i, n), o.y_stride);
    } else {
      jinfer::tile_zero<tile.value>();
    }
  };
  using Zero = std::integral_constant<int, 0>;
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Three = std::integral_constant<int, 3>;
  begin(Zero{}, 0, 0);
  if constexpr (I > 1) begin(One{}, 1, 0);
  if constexpr (O > 1) begin(Two{}, 0, 1);
  if constexpr (O > 1 && I > 1) begin(Three{}, 1, 1);
  const char *x0 = o.x, *x1 = o.x + kTileRows * o.x_stride, *w0 = o.w, *w1 = o.w + o.w_apart;
  const char* end = w0 + o.columns * kBf16Tile;
  for (; w0 != end; x0 += 64, x1 += 64, w0 += kBf16Tile, w1 += kBf16Tile) {
    jinfer::tile_load<6>(w0, 4 * L);
    jinfer::tile_load<4>(x0, x_stride);
    jinfer::tile_dot_bfloat<0, 4, 6>();
    if constexpr (I > 1) {
      jinfer::tile_load<5>(x1, x_stride);
      jinfer::tile_dot_bfloat<1, 5, 6>();
    }
    if constexpr (O > 1) {
      jinfer::tile_load<7>(w1, 4 * L);
      jinfer::tile_dot_bfloat<2, 4, 7>();
    }
    if constexpr (O > 1 && I > 1) jinfer::tile_dot_bfloat<3, 5, 7>();
  }
  jinfer::tile_store<0>(of_y(0, 0), o.y_stride);
  if constexpr (I > 1) jinfer::tile_store<1>(of_y(1, 0), o.y_stride);
  if constexpr (O > 1) jinfer::tile_store<2>(of_y(0, 1), o.y_stride);
  if constexpr (O > 1 && I > 1) jinfer::tile_store<3>(of_y(1, 1), o.y_stride);
}

// A decoded panel and the outputs it is for.
struct Bf16Panel {
  const char* tiles;  // [blocks][columns] of kBf16Tile bytes
  int64_t blocks;     // of 16 outputs
  int64_t columns;
  int64_t output;   // the first one
  int64_t outputs;  // that there are
};

// Rows from .. to - 1, in tiles of `first` and `second` rows; of both 32 of them at a time.
void multiply_bf16_rows(const Bf16Panel& panel, const Activations& x, int first, int second,
                        int64_t from, int64_t to, float* y, int64_t stride) {
  jinfer::TileShapes shapes;
  for (int tile : {0, 2, 4}) shapes.set(tile, first, 4 * L);
  for (int tile : {1, 3, 5}) shapes.set(tile, second, 4 * L);
  for (int tile : {6, 7}) shapes.set(tile, L, 4 * L);
  const jinfer::Tiles configured(shapes);
  const int64_t row_bytes = x.layout.digit_bytes(), apart = panel.columns * kBf16Tile;
  alignas(64) float some[kTwoTiles][kTwoTiles];  // outputs, of which not all are there
  for (int64_t block = 0; block < panel.blocks; block += 2) {
    const int64_t adjacent = std::min<int64_t>(2, panel.blocks - block);
    const int64_t left = std::min(panel.outputs - block * L, adjacent * L);
    const bool whole = left == adjacent * L;
    const int64_t pieces = whole ? (panel.columns + kBf16Piece - 1) / kBf16Piece : 1;
    const auto multiply = adjacent > 1
                              ? (second ? multiply_bf16_tiles<2, 2> : multiply_bf16_tiles<2, 1>)
                              : (second ? multiply_bf16_tiles<1, 2> : multiply_bf16_tiles<1, 1>);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t column = panel.columns * piece / pieces;
      Bf16Operands o;
      o.x_stride = row_bytes;
      o.w = panel.tiles + block * apart + column * kBf16Tile, o.w_apart = apart;
      o.columns = panel.columns * (piece + 1) / pieces - column;
      o.add = piece > 0;
      o.y_stride = 4 * (whole ? stride : kTwoTiles);
      for (int64_t row = from; row < to; row += kTwoTiles) {
        float* of_row = y + row * stride + panel.output + block * L;
        o.x = x.data + row * row_bytes + column * 64;
        o.y = whole ? of_row : some[0];
        multiply(o);
        for (int r = 0; !whole && r < first + second; ++r)
          std::memcpy(of_row + r * stride, some[r], 4 * left);
      }
    }
  }
}

template <int g, int parts>
void multiply_bf16(const MatmulPlan& plan, const Activations& x, int64_t rows, int64_t begin,
                   int64_t end, float* y, int64_t stride, Scratch& scratch) {
  const Matrix& m = *plan.matrix;
  const int64_t columns = plan.units * g, bytes = columns * kBf16Tile;
  const int64_t blocks = (end - begin + g - 1) / g;
  const int64_t together = std::min(std::max<int64_t>(kBf16Panel / bytes / 2, 1) * 2, blocks);
  const int64_t adjacent =
      std::max(kBf16RowBytes / x.layout.digit_bytes() / kTwoTiles * kTwoTiles, kTwoTiles);
  char* tiles = scratch.get(together * bytes + 2 * plan.units * parts * g * L * sizeof(float));
  float* buffer = reinterpret_cast<float*>(tiles + together * bytes);
  for (int64_t first = 0; first < blocks; first += together) {
    const int64_t here = std::min(together, blocks - first), group = begin + first * g;
    for (int64_t i = 0; i < here; ++i)
      fill_bf16_block<g, parts>(plan, group + i * g, end, buffer, tiles + i * bytes);
    const int64_t output = group * (L / g);
    const int64_t outputs = std::min(std::min(here * g, end - group) * (L / g), m.outputs - output);
    const Bf16Panel panel{tiles, here, columns, output, outputs};
    for (int64_t row = 0; row < rows; row += adjacent) {
      const int64_t last = std::min(rows, row + adjacent), rest = (last - row) % kTwoTiles;
      if (rest < last - row)
        multiply_bf16_rows(panel, x, kTileRows, kTileRows, row, last - rest, y, stride);
      const int few = std::min<int64_t>(rest, kTileRows);
      if (rest) multiply_bf16_rows(panel, x, few, rest - few, last - rest, last, y, stride);
    }
  }
}

void prepare_any(const float* x, int64_t inputs, const ActivationLayout& layout, char* row) {
  const bool bf16 = layout.form == jinfer::ActivationForm::bf16_tiles;
  (bf16 ? prepare_bf16 : prepare)(x, inputs, layout, row);
}

// Tiles for rows in their layouts, else the vector kernels.
void multiply_any(const Matrix& matrix, const Activations& x, int64_t rows, int64_t begin,
                  int64_t end, float* y, int64_t stride) {
  const bool bf16 = x.layout.form == jinfer::ActivationForm::bf16_tiles;
  if (!bf16 && x.layout.form != jinfer::ActivationForm::tiles)
    return multiply(matrix, x, rows, begin, end, y, stride);
  static thread_local Scratch scratch;
  const MatmulPlan& plan = plan_of(matrix);
  with_columns(matrix.G, [&](auto columns) {
    constexpr int g = decltype(columns)::value, max_parts = kMostParts<g>;
    const auto of = !bf16             ? multiply_amx<g>
                    : plan.parts == 2 ? multiply_bf16<g, max_parts>
                                      : multiply_bf16<g, 1>;
    of(plan, x, rows * x.layout.digits, begin * matrix.R * g / L, end * matrix.R * g / L, y, stride,
       scratch);
  });
}

const jinfer::LinearKernels kernels_with_amx{prepare_any, multiply_any, jinfer::glu, kAmxMinRows,
                                             kBf16MinRows};

}  // namespace
