// Code widths of quantized weights and cached vectors, as `_WIDTHS` of
// jinfer/quant_format.py.
#pragma once

namespace jinfer {

struct CodeWidth {
  int levels;    // of a number
  int bits;      // of a code
  int per_code;  // numbers in a code
};

constexpr int kThreeAndAHalf = 7;  // bits of a code that is a pair, 11 * x + y: 3.5 a number

constexpr CodeWidth kWidths[] = {
    {4, 2, 1},  {8, 3, 1},   {11, kThreeAndAHalf, 2}, {16, 4, 1}, {32, 5, 1},
    {64, 6, 1}, {256, 8, 1}, {65536, 16, 1},
};

// Numbers in a code of so many bits; 0: there are no such codes.
constexpr int per_code_of(int bits) {
  for (const CodeWidth& width : kWidths)
    if (width.bits == bits) return width.per_code;
  return 0;
}

namespace {

// Some bits of a code: (byte >> low) & (2^width - 1), at bit `at` of the code.
struct Piece {
  int byte, low, width, at;
};
struct Pieces {
  int count;
  Piece of[7];  // the rest have width 0
};

// The bits of code s of a strip, as PIECES of jinfer/quant/bit_packing.py.
constexpr Pieces pieces(int bits, int s) {
  if (bits == 2) return {1, {{s % 2, 2 * (s / 2), 2, 0}}};
  if (bits == 4) return {1, {{s % 4, 4 * (s / 4), 4, 0}}};
  if (bits == 3) {
    if (s < 6) return {1, {{s % 3, 3 * (s / 3), 3, 0}}};
    if (s == 6) return {2, {{0, 6, 2, 0}, {2, 6, 1, 2}}};
    return {2, {{1, 6, 2, 0}, {2, 7, 1, 2}}};
  }
  if (s < bits) return {1, {{s, 0, bits, 0}}};
  if (bits == 5) {
    if (s == 5) return {2, {{0, 5, 3, 0}, {1, 5, 2, 3}}};
    if (s == 6) return {2, {{2, 5, 3, 0}, {3, 5, 2, 3}}};
    return {3, {{4, 5, 3, 0}, {1, 7, 1, 3}, {3, 7, 1, 4}}};
  }
  if (bits == 6) {
    if (s == 6) return {3, {{0, 6, 2, 0}, {1, 6, 2, 2}, {2, 6, 2, 4}}};
    return {3, {{3, 6, 2, 0}, {4, 6, 2, 2}, {5, 6, 2, 4}}};
  }
  return {7,
          {{0, 7, 1, 0},
           {1, 7, 1, 1},
           {2, 7, 1, 2},
           {3, 7, 1, 3},
           {4, 7, 1, 4},
           {5, 7, 1, 5},
           {6, 7, 1, 6}}};
}

}  // namespace
}  // namespace jinfer
