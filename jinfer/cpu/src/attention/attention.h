// Paged attention: the call's arguments, and the kernels of each instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/code_widths.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace jinfer {

// Format of quantized vectors in blocks of 32; see QuantFormat in jinfer/quant_format.py.
struct KvFormat {
  int bits, levels, per_code;
  bool symmetric;

  int columns(int dim) const { return (dim + 32 * per_code - 1) / (32 * per_code); }
  int words(int dim) const { return columns(dim) * bits; }
  int numbers(int dim) const { return columns(dim) * per_code * (symmetric ? 1 : 2); }
};

// Keys, or values, of the whole pool: [vectors, dim] of one dtype.
struct CachedVectors {
  DType dtype;
  KvFormat format;
  int dim;
  void* data;
  uint16_t* numbers;

  // Whether kernels may compute with the stored vectors directly, in whole SIMD vectors.
  bool streams() const { return dtype != DType::quantized && dim == padded(); }

  // Bytes of a vector's numbers or codes, without the numbers of codes; and where they are.
  int64_t stride() const {
    return dtype == DType::quantized ? 4 * format.words(dim) : int64_t(dim) * bytes_of(dtype);
  }
  const char* at(int64_t vector) const {
    return static_cast<const char*>(data) + vector * stride();
  }

  // Floats of a vector in scratch memory, padded to whole SIMD vectors of any machine.
  int padded() const {
    int whole = dtype == DType::quantized ? format.columns(dim) * format.per_code * 32 : dim;
    return (whole + 15) / 16 * 16;
  }
};

constexpr int MAX_TILE_ROWS = 192;
constexpr int BLOCK_KEYS = 64;     // keys that are processed together
constexpr int32_t NOT_LOCAL = -1;  // a table's entry: a block of another device's pool
constexpr int SPLIT_KEYS = 512;    // keys of one softmax, whose result is then merged with others
constexpr int LONG_TEXT = 1024;    // position from which on a token's old splits may be in integers

// Scaling, masking and biases, as ScoreRules of jinfer/ops/attention/mask_rules.py.
struct ScoreRules {
  float scale, softcap;  // softcap 0: none
  int window, ahead;     // -1: none
  const float *sinks, *slopes;
  // Per head `distances` biases, largest distance first, padded by BLOCK_KEYS copies of the first
  // before them and of the last after them; null: none.
  const float* by_distance;
  int64_t distances, lowest;
};

// Queries of one key head and one sequence: (token, head of the group), token by token.
struct Tile {
  int64_t token, head;   // the first token
  int rows, first, end;  // keys first..end
  int64_t at;            // offset of the partial results of its splits

  int first_split() const { return first / SPLIT_KEYS; }
  int end_split() const { return first < end ? (end - 1) / SPLIT_KEYS + 1 : first_split(); }
  int splits() const { return end_split() - first_split(); }
};

struct Call {
  DType dtype;            // of queries, new keys and values, and results
  bool written;           // whether new keys and values are written to the pool first
  const void *q, *k, *v;  // null where nothing is written
  bool writes_in_tile;    // the thread that computes a tile also writes its tokens
  const int32_t *rows, *positions, *last, *tables;
  void* out;
  // Partial attention, over local blocks only: per query maximum score and sum of weights, and
  // `out` is float32 and not normalized. Null: not partial.
  float* sums;
  CachedVectors keys, values;
  char* int8_keys;  // [blocks, kv_heads, Int8Block::bytes(keys.dim)]; null: none
  bool shared;      // values are the keys
  ScoreRules rules;
  int64_t tokens, heads, kv_heads;
  int group;             // query heads per key head
  int64_t blocks, size;  // of the pool; positions of a block
  int64_t width;         // entries of a row of the tables

  DType out_dtype() const { return sums ? DType::f32 : dtype; }

  // Index among the queries [tokens, heads] of a tile's row r.
  int64_t row_of(const Tile& tile, int r) const {
    return (tile.token + r / group) * heads + tile.head * group + r % group;
  }

  int32_t block(int64_t row, int64_t position) const {
    return tables[row * width + position / size];
  }

  // Index of a head's vector in the pool.
  int64_t vector(int64_t row, int64_t head, int64_t position) const {
    return (block(row, position) * kv_heads + head) * size + position % size;
  }

  // The keys first..end that a token attends to.
  void seen(int64_t token, int* first, int* end) const {
    int64_t position = positions[token], stop = last[token] + int64_t(1);
    if (rules.ahead >= 0) stop = std::min<int64_t>(stop, position + rules.ahead);
    stop = std::max<int64_t>(0, std::min<int64_t>(stop, width * size));
    int64_t from = rules.window >= 0 ? position - rules.window + 1 : 0;
    *first = int(std::max<int64_t>(0, std::min(from, stop)));
    *end = int(stop);
  }
};

// The split that a thread probably computes next, for prefetching; perhaps the same.
struct NextSplit {
  const Tile& tile;
  int split;
};

// Kernels of an instruction set. `scratch` holds the floats that the function of the kernel's name
// with `_floats` says.
struct AttentionKernels {
  // Writes a token's new key and value of one head to the cache.
  void (*write)(const Call&, int64_t token, int64_t head, float* scratch);
  // Writes a head's int8 keys of a split, whose keys are all in the cache.
  void (*write_int8)(const Call&, int64_t row, int split, int64_t head, float* scratch);
  // Computes one split of a tile into `partial`; merges all splits into the results.
  void (*split)(const Call&, const Tile&, int split, const NextSplit& next, float* partial,
                float* scratch);
  void (*merge)(const Call&, const Tile&, const float* partial, float* scratch);
  // Computes a whole tile, adding in the same order.
  void (*tile)(const Call&, const Tile&, float* scratch);
};

// Floats of a partial row: maximum score, sum of weights, weighted sum.
inline int64_t partial_floats(const Call& c) { return c.values.padded() + 16; }

inline int64_t write_floats(const Call& c) { return c.keys.padded() + c.values.padded(); }
inline int64_t merge_floats(const Call& c) { return MAX_TILE_ROWS * partial_floats(c); }
inline int64_t split_floats(const Call& c) {
  return (MAX_TILE_ROWS + 3 * BLOCK_KEYS) * int64_t(c.keys.padded()) +
         2 * BLOCK_KEYS * int64_t(c.values.padded()) + 8192;
}
inline int64_t tile_floats(const Call& c) { return split_floats(c) + 2 * merge_floats(c); }

const AttentionKernels& attention_portable();
const AttentionKernels& attention_avx2();
const AttentionKernels& attention_avx512();
inline const AttentionKernels& attention_kernels() { return JINFER_DISPATCH(attention); }

}  // namespace jinfer
