// What attention over the cache is given, and the functions that each set of instructions has.
#pragma once

#include <cstdint>

namespace jinfer {

enum class Kind { f32, bf16, f16, codes };

inline int bytes_of(Kind kind) { return kind == Kind::f32 ? 4 : 2; }

// How codes stand for numbers; see QuantFormat in jinfer/quant/format.py. Blocks are of 32.
struct Codes {
  int bits, levels, per_code;
  bool symmetric;

  int columns(int dim) const { return (dim + 32 * per_code - 1) / (32 * per_code); }
  int words(int dim) const { return columns(dim) * bits; }
  int numbers(int dim) const { return columns(dim) * per_code * (symmetric ? 1 : 2); }
};

// Keys, or values, of the whole cache: [vectors, dim] in one of the kinds.
struct Kept {
  Kind kind;
  Codes codes;
  int dim;
  void* data;
  uint16_t* numbers;

  // Floats of a vector in scratch memory: whole vectors of any machine's.
  int padded() const {
    int whole = kind == Kind::codes ? codes.columns(dim) * codes.per_code * 32 : dim;
    return (whole + 15) / 16 * 16;
  }
};

struct Sight {
  float scale, softcap;  // softcap 0: none
  int window, ahead;     // -1: none
  const float *sinks, *slopes;
};

struct Call {
  Kind kind;              // of queries, new keys and values, and results
  const void *q, *k, *v;  // k is null where nothing is to be written
  const int32_t *positions, *last;
  void* out;
  Kept keys, values;
  bool shared;  // values are the keys
  Sight sight;
  int64_t batch, tokens, heads, kv_heads, length, slot;

  int64_t group() const { return heads / kv_heads; }

  // Index in the cache of a row's first vector.
  int64_t vectors(int64_t b, int64_t head) const { return ((slot + b) * kv_heads + head) * length; }

  // The keys that a query sees are first..end.
  void seen(int64_t b, int64_t token, int* first, int* end) const {
    int64_t position = positions[b * tokens + token], stop = last[b * tokens + token] + int64_t(1);
    if (sight.ahead >= 0 && stop > position + sight.ahead) stop = position + sight.ahead;
    if (stop > length) stop = length;
    if (stop < 0) stop = 0;
    int64_t from = sight.window >= 0 ? position - sight.window + 1 : 0;
    *first = int(from < 0 ? 0 : from > stop ? stop : from);
    *end = int(stop);
  }
};

constexpr int ROWS = 192;  // of a tile, at most

// Queries of one key head: (token, head of the group), token by token.
struct Tile {
  int64_t b, head, token;  // the first token
  int rows, first, end;    // keys first..end
  int parts;               // of the walk over all its keys
  int64_t at;              // where its partial results stand
};

// `scratch` has room for as many floats as the function of its name with `_floats` says.
struct Kernels {
  void (*write)(const Call&, int64_t b, int64_t head, int64_t start, float* scratch);
  void (*run)(const Call&, const Tile&, float* partial, float* scratch);
  void (*merge)(const Call&, const Tile&, const float* partial, float* scratch);
};

constexpr int KEYS = 64;  // of a block

inline int64_t write_floats(const Call& c) {
  return c.keys.padded() + c.values.padded();
}
inline int64_t run_floats(const Call& c, const Tile& tile) {
  int64_t keys = c.keys.padded(), values = c.values.padded();
  return (tile.rows + KEYS + 16) * (keys + values) + values;
}
inline int64_t merge_floats(const Call& c) { return 2 * c.values.padded(); }

// Floats of a partial result's row: highest score, sum of weights, weighted sum.
inline int64_t partial_floats(const Call& c) { return c.values.padded() + 2; }

const Kernels& attention_portable();
const Kernels& attention_avx2();
const Kernels& attention_avx512();

}  // namespace jinfer
