// GGUF: repacks quantized blocks into tiles without loss, and F16 nearly so.
// jinfer/quant/gguf_blocks.py documents each type and does the same in NumPy. A plain C function,
// which Python calls without the GIL.
#include <cstdint>
#include <cstring>

namespace jinfer {
namespace {

constexpr uint32_t kFirstBit = 0x01010101, kTwoBits = 0x03030303, kNibble = 0x0f0f0f0f;

// Word `index` of a field: four consecutive codes, or bits of them.
inline uint32_t word(const uint8_t* field, int index) {
  uint32_t value;
  std::memcpy(&value, field + 4 * index, 4);
  return value;
}

// Packs a column's 32 codes; four(s) has codes 4 s .. 4 s + 3 in its bytes. As `pack_fours`.
template <int bits, class Four>
inline void pack(Four four, uint32_t* to) {
  uint32_t last[2];  // codes that are split over bits that others leave
  for (int t = 0; t < bits; ++t) to[t] = 0;
  constexpr int whole = bits == 2 || bits == 4 ? 8 : 6 - (bits == 5);
  for (int s = 0; s < whole; ++s) to[s % bits] |= four(s) << (bits * (s / bits));
  if constexpr (bits == 3) {
    for (int n = 0; n < 2; ++n) {
      last[n] = four(6 + n);
      to[n] |= (last[n] & kTwoBits) << 6;
      to[2] |= ((last[n] >> 2) & kFirstBit) << (6 + n);
    }
  } else if constexpr (bits == 5) {
    for (int n = 0; n < 2; ++n) {
      last[n] = four(5 + n);
      to[2 * n] |= (last[n] & (7 * kFirstBit)) << 5;
      to[2 * n + 1] |= ((last[n] >> 3) & kTwoBits) << 5;
    }
    last[0] = four(7);
    to[4] |= (last[0] & (7 * kFirstBit)) << 5;
    to[1] |= ((last[0] >> 3) & kFirstBit) << 7;
    to[3] |= ((last[0] >> 4) & kFirstBit) << 7;
  } else if constexpr (bits == 6) {
    for (int n = 0; n < 2; ++n) {
      last[n] = four(6 + n);
      for (int t = 0; t < 3; ++t) to[3 * n + t] |= ((last[n] >> (2 * t)) & kTwoBits) << 6;
    }
  }
}

// Block types: bytes `size`, `columns` of 32 weights, `bits` of a code, and `parts` with `scales`
// bytes of numbers each, plus `steps` bytes of numbers of the whole block.

// 32 weights; numbers of two bytes, then codes.
template <int numbers, int code_bytes>
struct Of32 {
  static constexpr int size = 2 * numbers + code_bytes, columns = 1, parts = 1;
  static constexpr int scales = 2 * numbers, steps = 0;
  static const uint8_t* codes(const uint8_t* block) { return block + 2 * numbers; }
  static void put_numbers(const uint8_t* block, uint8_t* to, uint8_t*) {
    std::memcpy(to, block, scales);
  }
};

template <int numbers>
struct FourBits : Of32<numbers, 16> {
  static constexpr int bits = 4;
  static void put_words(const uint8_t* block, int, uint32_t* to) {
    std::memcpy(to, FourBits::codes(block), 16);
  }
};

template <int numbers>
struct FiveBits : Of32<numbers, 20> {
  static constexpr int bits = 5;
  static void put_words(const uint8_t* block, int, uint32_t* to) {
    const uint8_t* codes = FiveBits::codes(block);
    const uint32_t fifth = word(codes, 0);
    const auto four = [&](int s) {
      const uint32_t low = (word(codes, 1 + s % 4) >> (4 * (s / 4))) & kNibble;
      // Spreads four bits to four bytes: bit i goes to 8 i by multiplication with 2 ** (7 i).
      return low | ((((fifth >> (4 * s)) & 15) * 0x00204081u) & kFirstBit) << 4;
    };
    pack<bits>(four, to);
  }
};

struct EightBits : Of32<1, 32> {
  static constexpr int bits = 8;
  static void put_words(const uint8_t* block, int, uint32_t* to) {
    for (int t = 0; t < 8; ++t) to[t] = word(codes(block), t) ^ 0x80808080u;
  }
};

struct Mxfp4 {
  static constexpr int size = 17, columns = 1, parts = 1, scales = 2, steps = 0, bits = 4;
  static void put_words(const uint8_t* block, int, uint32_t* to) { std::memcpy(to, block + 1, 16); }
  // Float16 of the scale, 2 ** (exponent - 128); 0 where it is no float16.
  static void put_numbers(const uint8_t* block, uint8_t* to, uint8_t*) {
    const int power = block[0] - 128;
    const bool normal = power >= -14 && power <= 15, small = power >= -24 && power < -14;
    const uint16_t half = normal ? (power + 15) << 10 : small ? 1 << (power + 24) : 0;
    std::memcpy(to, &half, 2);
  }
};

// 256 weights: eight columns.
template <int code_bits, int block_bytes, int block_parts, int numbers>
struct Of256 {
  static constexpr int size = block_bytes, columns = 8, bits = code_bits, parts = block_parts;
  static constexpr int scales = numbers, steps = 2 * numbers;
};

// Bits of codes in a field, in the column order of each type.
inline uint32_t bit(const uint8_t* field, int column, int s) {
  return (word(field, s) >> column) & kFirstBit;
}
inline uint32_t pair(const uint8_t* field, int column, int s) {
  return (word(field, 8 * (column / 4) + s) >> (2 * (column % 4))) & kTwoBits;
}
inline uint32_t nibble(const uint8_t* field, int column, int s) {
  return (word(field, 8 * (column / 2) + s) >> (4 * (column % 2))) & kNibble;
}
inline uint32_t nibble_of_64(const uint8_t* field, int column, int s) {
  const int first = 16 * (column / 4) + 8 * (column % 2);
  return (word(field, first + s) >> (4 * (column / 2 % 2))) & kNibble;
}

// d and -dmin, stored next to each other.
inline void put_step_and_floor(const uint8_t* from, uint8_t* to) {
  std::memcpy(to, from, 4);
  to[3] ^= 0x80;
}

struct Q2K : Of256<2, 84, 16, 2> {
  static void put_words(const uint8_t* block, int column, uint32_t* to) {
    pack<bits>([&](int s) { return pair(block + 16, column, s); }, to);
  }
  static void put_numbers(const uint8_t* block, uint8_t* to, uint8_t* steps) {
    for (int part = 0; part < parts; ++part)
      to[2 * part] = block[part] & 15, to[2 * part + 1] = block[part] >> 4;
    put_step_and_floor(block + 80, steps);
  }
};

struct Q3K : Of256<3, 110, 16, 1> {
  static void put_words(const uint8_t* block, int column, uint32_t* to) {
    const auto four = [&](int s) {
      return bit(block, column, s) << 2 | pair(block + 32, column, s);
    };
    pack<bits>(four, to);
  }
  static void put_numbers(const uint8_t* block, uint8_t* to, uint8_t* steps) {
    const uint8_t *low = block + 96, *high = block + 104;
    for (int part = 0; part < parts; ++part) {
      const int four = (low[part % 8] >> (4 * (part / 8))) & 15;
      const int two = (high[part % 4] >> (2 * (part / 4))) & 3;
      to[part] = (four | two << 4) - 32;
    }
    std::memcpy(steps, block + 108, 2);
  }
};

// d, -dmin, then 8 scales and 8 minima of 6 bits in 12 bytes: see `six_bit_numbers`.
template <int code_bits, int block_bytes>
struct WithMinima : Of256<code_bits, block_bytes, 8, 2> {
  static void put_numbers(const uint8_t* block, uint8_t* to, uint8_t* steps) {
    put_step_and_floor(block, steps);
    for (int part = 0; part < 4; ++part) {
      const uint8_t first = block[4 + part], second = block[8 + part], low = block[12 + part];
      to[2 * part] = first & 63, to[2 * part + 1] = second & 63;
      to[2 * part + 8] = (low & 15) | ((first >> 2) & 48);
      to[2 * part + 9] = (low >> 4) | ((second >> 2) & 48);
    }
  }
};

struct Q4K : WithMinima<4, 144> {
  static void put_words(const uint8_t* block, int column, uint32_t* to) {
    pack<bits>([&](int s) { return nibble(block + 16, column, s); }, to);
  }
};

struct Q5K : WithMinima<5, 176> {
  static void put_words(const uint8_t* block, int column, uint32_t* to) {
    const auto four = [&](int s) {
      return bit(block + 16, column, s) << 4 | nibble(block + 48, column, s);
    };
    pack<bits>(four, to);
  }
};

struct Q6K : Of256<6, 210, 16, 1> {
  static void put_words(const uint8_t* block, int column, uint32_t* to) {
    const auto four = [&](int s) {
      return pair(block + 128, column, s) << 4 | nibble_of_64(block, column, s);
    };
    pack<bits>(four, to);
  }
  static void put_numbers(const uint8_t* block, uint8_t* to, uint8_t* steps) {
    std::memcpy(to, block + 192, 16);
    std::memcpy(steps, block + 208, 2);
  }
};

struct Iq4Xs : Of256<4, 136, 8, 1> {
  static void put_words(const uint8_t* block, int column, uint32_t* to) {
    std::memcpy(to, block + 8 + 16 * column, 16);
  }
  static void put_numbers(const uint8_t* block, uint8_t* to, uint8_t* steps) {
    for (int part = 0; part < parts; ++part) {
      const int low = (block[4 + part / 2] >> (4 * (part % 2))) & 15;
      const int high = (block[2 + part / 4] >> (2 * (part % 4))) & 3;
      to[part] = (low | high << 4) - 32;
    }
    std::memcpy(steps, block, 2);
  }
};

// A matrix's tiles, from the first row's on: words [tiles, superblocks, bits, rows, columns],
// scales and steps [tiles, superblocks, rows, bytes].
struct Tiles {
  int64_t superblocks, rows, columns;
  uint32_t* words;
  uint8_t *scales, *steps;
};

template <class Type>
void repack_row(const uint8_t* from, int64_t blocks, int64_t row, const Tiles& to) {
  const int64_t each = to.columns / Type::columns;  // blocks of a superblock
  const int64_t lanes = to.rows * to.columns, in_tile = row % to.rows;
  for (int64_t b = 0; b < blocks; ++b, from += Type::size) {
    const int64_t superblock = row / to.rows * to.superblocks + b / each, in = b % each;
    uint32_t* words = to.words + superblock * Type::bits * lanes + in_tile * to.columns;
    for (int column = 0; column < Type::columns; ++column) {
      uint32_t packed[Type::bits];
      Type::put_words(from, column, packed);
      for (int t = 0; t < Type::bits; ++t)
        words[t * lanes + in * Type::columns + column] = packed[t];
    }
    const int64_t at = (superblock * to.rows + in_tile) * each + in;
    Type::put_numbers(from, to.scales + at * Type::parts * Type::scales,
                      to.steps + at * Type::steps);
  }
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Magnitude of an F16 number; exact, as only a power of two is missing.
inline float widened(uint16_t bits) {
  return float_of((bits & 0x7fffu) << 13) * 5.192296858534828e33f;  // 2^112
}

// F16 numbers as integers in blocks of 64: `quantize_f16` in jinfer/quant/f16_as_int.py.
void repack_f16_row(const uint8_t* from, int64_t blocks, int64_t row, const Tiles& to) {
  constexpr int kBlock = 64, kBits = 13, kLeast = -24, kInfinite = 0x7c00;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23, whose last bit counts 1
  const int64_t lanes = to.rows * to.columns, in_tile = row % to.rows;
  for (int64_t b = 0; b < blocks; ++b, from += 2 * kBlock) {
    uint16_t bits[kBlock], max_value = 0;
    std::memcpy(bits, from, sizeof bits);
    for (int i = 0; i < kBlock; ++i) {
      const uint16_t magnitude = bits[i] & 0x7fff;
      max_value = magnitude > max_value ? magnitude : max_value;
    }
    const float largest = widened(max_value);
    uint32_t largest_bits;
    std::memcpy(&largest_bits, &largest, 4);
    int power = static_cast<int>(largest_bits >> 23) - 126 - kBits;
    if (power < kLeast) power = kLeast;
    const bool known = max_value < kInfinite;
    const float by = float_of((127 - power) << 23);  // 2^-power
    uint16_t codes[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const float rounded = widened(bits[i]) * by + kRound;
      uint32_t whole;
      std::memcpy(&whole, &rounded, 4);
      const uint16_t code = whole, negative = bits[i] >> 15;
      codes[i] = known ? static_cast<uint16_t>((code ^ -negative) + negative) : 0;
    }
    const int64_t superblock = row / to.rows * to.superblocks + b;
    uint32_t* words = to.words + superblock * 16 * lanes + in_tile * to.columns;
    for (int t = 0; t < 16; ++t)
      for (int column = 0; column < 2; ++column)
        std::memcpy(words + t * lanes + column, codes + 32 * column + 2 * t, 4);
    const uint16_t scale = !known ? 0x7e00 : power >= -14 ? (power + 15) << 10 : 1 << (power + 24);
    std::memcpy(to.scales + 2 * (superblock * to.rows + in_tile), &scale, 2);
  }
}

using RepackRow = void (*)(const uint8_t*, int64_t, int64_t, const Tiles&);
struct Named {
  const char* name;
  RepackRow repack;
  int64_t columns = 0;  // required columns of a superblock; 0: any
};
constexpr Named kTypes[] = {
    {"Q4_0", repack_row<FourBits<1>>}, {"Q4_1", repack_row<FourBits<2>>},
    {"Q5_0", repack_row<FiveBits<1>>}, {"Q5_1", repack_row<FiveBits<2>>},
    {"Q8_0", repack_row<EightBits>},   {"IQ4_NL", repack_row<FourBits<1>>},
    {"MXFP4", repack_row<Mxfp4>},      {"Q2_K", repack_row<Q2K>},
    {"Q3_K", repack_row<Q3K>},         {"Q4_K", repack_row<Q4K>},
    {"Q5_K", repack_row<Q5K>},         {"Q6_K", repack_row<Q6K>},
    {"IQ4_XS", repack_row<Iq4Xs>},     {"F16", repack_f16_row, 2},
};

}  // namespace
}  // namespace jinfer

// Repacks rows of `blocks` blocks, `stride` bytes apart, to the first rows of tiles; returns 0 for
// an unknown type. A superblock holds whole blocks; what a row does not fill is left untouched.
extern "C" __attribute__((visibility("default"))) int jinfer_repack(
    const char* type, const uint8_t* from, int64_t stride, int64_t rows, int64_t blocks,
    int64_t superblocks, int64_t tile_rows, int64_t columns, uint32_t* words, uint8_t* scales,
    uint8_t* steps) {
  for (const jinfer::Named& known : jinfer::kTypes) {
    if (std::strcmp(known.name, type)) continue;
    if (known.columns && known.columns != columns) return 0;
    const jinfer::Tiles to{superblocks, tile_rows, columns, words, scales, steps};
    for (int64_t row = 0; row < rows; ++row) known.repack(from + row * stride, blocks, row, to);
    return 1;
  }
  return 0;
}
