// AMX tiles: registers of up to 16 rows of up to 64 bytes, and their products ("Intel 64 and IA-32
// Architectures Software Developer's Manual", volume 2, TDPBSSD and TDPBF16PS).
//
// With JINFER_TILES_EMULATED, for tests, plain code does the same on any processor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace jinfer {
namespace {

// Rows and row bytes of each tile, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int rows_of, int bytes_of) { rows[tile] = rows_of, bytes[tile] = bytes_of; }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(JINFER_TILES_EMULATED)

struct EmulatedTiles {
  TileShapes shapes;
  uint8_t data[8][16][64];
};
inline EmulatedTiles& emulated() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

inline void configure_tiles(const TileShapes& shapes) {
  emulated().shapes = shapes;
  std::memset(emulated().data, 0, sizeof emulated().data);
}
inline void release_tiles() { emulated().shapes = TileShapes{}; }

template <int tile>
inline void tile_zero() {
  std::memset(emulated().data[tile], 0, sizeof emulated().data[tile]);
}
template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  tile_zero<tile>();
  const TileShapes& shapes = emulated().shapes;
  for (int row = 0; row < shapes.rows[tile]; ++row)
    std::memcpy(emulated().data[tile][row], static_cast<const char*>(from) + row * stride,
                shapes.bytes[tile]);
}
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  const TileShapes& shapes = emulated().shapes;
  for (int row = 0; row < shapes.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, emulated().data[tile][row],
                shapes.bytes[tile]);
}

// Calls f(a row of `sum`, columns, depth, the row of `a`, `b`).
template <int sum, int a, int b, class F>
inline void emulate_dot(F f) {
  EmulatedTiles& tiles = emulated();
  const int columns = tiles.shapes.bytes[sum] / 4, depth = tiles.shapes.bytes[a] / 4;
  for (int row = 0; row < tiles.shapes.rows[sum]; ++row)
    f(tiles.data[sum][row], columns, depth, tiles.data[a][row], tiles.data[b]);
}

template <int sum, int a, int b, class Of>
inline void emulate_bytes() {
  emulate_dot<sum, a, b>([](uint8_t* sums, int columns, int depth, const uint8_t* x, auto* w) {
    for (int n = 0; n < columns; ++n) {
      int32_t total;
      std::memcpy(&total, sums + 4 * n, 4);
      for (int k = 0; k < depth; ++k)
        for (int i = 0; i < 4; ++i)
          total += static_cast<int8_t>(x[4 * k + i]) * static_cast<Of>(w[k][4 * n + i]);
      std::memcpy(sums + 4 * n, &total, 4);
    }
  });
}
template <int sum, int a, int b>
inline void tile_dot_signed() {
  emulate_bytes<sum, a, b, int8_t>();
}
template <int sum, int a, int b>
inline void tile_dot_unsigned() {
  emulate_bytes<sum, a, b, uint8_t>();
}

// Denormals count as 0.
inline float flushed(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? x * 0.0f : x; }
inline float widened(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}
template <int sum, int a, int b>
inline void tile_dot_bfloat() {
  emulate_dot<sum, a, b>([](uint8_t* sums, int columns, int depth, const uint8_t* x, auto* w) {
    for (int n = 0; n < columns; ++n) {
      float total, of[2] = {0, 0};
      std::memcpy(&total, sums + 4 * n, 4);
      for (int k = 0; k < depth; ++k)
        for (int i = 0; i < 2; ++i)
          of[i] = flushed(
              __builtin_fmaf(widened(x + 4 * k + 2 * i), widened(w[k] + 4 * n + 2 * i), of[i]));
      total = flushed(flushed(total) + flushed(of[0] + of[1]));
      std::memcpy(sums + 4 * n, &total, 4);
    }
  });
}

#else

// Not the compiler's intrinsics, which do not tell it that a load reads memory.
inline void configure_tiles(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease"); }

template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

// sum[m][n] += the products of a's row m, signed bytes, and b's column n, four bytes of each row.
template <int sum, int a, int b>
inline void tile_dot_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
}
template <int sum, int a, int b>
inline void tile_dot_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
}
// The same for bfloat16, two per row: even and odd inputs are added up separately in float32.
template <int sum, int a, int b>
inline void tile_dot_bfloat() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
}

#endif

// Configures the tiles for its lifetime.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { configure_tiles(shapes); }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace jinfer
