// Code widths of quantized weights and cached vectors, as `_WIDTHS` of
// jinfer/modelspec/quant_format.py.
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

}  // namespace jinfer
