// What attention over a paged cache is given, and the functions that each set of instructions has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/code_widths.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace jinfer {

// How codes stand for numbers; see QuantFormat in jinfer/modelspec/quant_format.py. Blocks are of 32.
struct KvFormat {
  int bits, levels, per_code;
  bool symmetric;

  int columns(int dim) const { return (dim + 32 * per_code - 1) / (32 * per_code); }
  int words(int dim) const { return columns(dim) * bits; }
  int numbers(int dim) const { return columns(dim) * per_code * (symmetric ? 1 : 2); }
};

// Keys, or values, of a whole pool: [vectors, dim] in one of the kinds.
struct CachedVectors {
  DType dtype;
  KvFormat format;
  int dim;
  void* data;
  uint16_t* numbers;

  // Whether vectors are computed with as they stand: in whole vectors of any machine's.
  bool streams() const { return dtype != DType::quantized && dim == padded(); }

  const char* at(int64_t vector) const {
    return static_cast<const char*>(data) + vector * dim * bytes_of(dtype);
  }

  // Floats of a vector in scratch memory: whole vectors of any machine's.
  int padded() const {
    int whole = dtype == DType::quantized ? format.columns(dim) * format.per_code * 32 : dim;
    return (whole + 15) / 16 * 16;
  }
};

constexpr int MAX_TILE_ROWS = 192;  // of a tile, at most
constexpr int BLOCK_KEYS = 64;   // of a block
constexpr int32_t NOT_LOCAL = -1;  // in a table: a block of another pool
constexpr int SPLIT_KEYS = 512;  // keys whose softmax is taken together, then merged with the others'

// As ScoreRules of jinfer/ops/attention/mask_rules.py.
struct ScoreRules {
  float scale, softcap;  // softcap 0: none
  int window, ahead;     // -1: none
  const float *sinks, *slopes;
  // Of each head `distances` numbers, the one of the largest distance first, between BLOCK_KEYS copies
  // of the first and BLOCK_KEYS of the last; null: none.
  const float* by_distance;
  int64_t distances, lowest;
};

// Queries of one key head and one sequence: (token, head of the group), token by token.
struct Tile {
  int64_t token, head;  // the first token
  int rows, first, end;  // keys first..end
  int64_t at;            // where the results of its parts stand, one after the other

  int first_split() const { return first / SPLIT_KEYS; }
  int end_split() const { return first < end ? (end - 1) / SPLIT_KEYS + 1 : first_split(); }
  int splits() const { return end_split() - first_split(); }
};

struct Call {
  DType dtype;              // of queries, new keys and values, and results
  bool written;           // whether new keys and values are put into the pool first
  const void *q, *k, *v;  // null where nothing is written
  bool writes_in_tile;              // who computes a whole tile writes its tokens
  const int32_t *rows, *positions, *last, *tables;
  void* out;
  // Of attention over the blocks that are here alone, where a block may be NOT_LOCAL: highest score
  // and sum of weights of each query; `out` is then float32, and not divided by the sum. Else null.
  float* sums;
  CachedVectors keys, values;
  bool shared;  // values are the keys
  ScoreRules rules;
  int64_t tokens, heads, kv_heads;
  int group;             // query heads of a key head
  int64_t blocks, size;  // of the pool, and positions of a block
  int64_t width;         // entries of a row of the tables

  DType out_dtype() const { return sums ? DType::f32 : dtype; }

  // Which of the queries [tokens, heads] is row r of a tile.
  int64_t row_of(const Tile& tile, int r) const {
    return (tile.token + r / group) * heads + tile.head * group + r % group;
  }

  int32_t block(int64_t row, int64_t position) const {
    return tables[row * width + position / size];
  }

  // Index in the pool of a head's vector.
  int64_t vector(int64_t row, int64_t head, int64_t position) const {
    return (block(row, position) * kv_heads + head) * size + position % size;
  }

  // The keys that a token sees are first..end.
  void seen(int64_t token, int* first, int* end) const {
    int64_t position = positions[token], stop = last[token] + int64_t(1);
    if (rules.ahead >= 0) stop = std::min<int64_t>(stop, position + rules.ahead);
    stop = std::max<int64_t>(0, std::min<int64_t>(stop, width * size));
    int64_t from = rules.window >= 0 ? position - rules.window + 1 : 0;
    *first = int(std::max<int64_t>(0, std::min(from, stop)));
    *end = int(stop);
  }
};

// `scratch` has room for as many floats as the function of its name with `_floats` says.
struct AttentionKernels {
  // A token's new key and value of one head into the cache.
  void (*write)(const Call&, int64_t token, int64_t head, float* scratch);
  // One part of a tile into `partial`, and all of them to the results.
  void (*split)(const Call&, const Tile&, int split, float* partial, float* scratch);
  void (*merge)(const Call&, const Tile&, const float* partial, float* scratch);
  // The whole tile, in the same order.
  void (*tile)(const Call&, const Tile&, float* scratch);
};

// Floats of a part's row: highest score, sum of weights, weighted sum.
inline int64_t partial_floats(const Call& c) { return c.values.padded() + 16; }

inline int64_t write_floats(const Call& c) { return c.keys.padded() + c.values.padded(); }
inline int64_t merge_floats(const Call& c) { return MAX_TILE_ROWS * partial_floats(c); }
inline int64_t split_floats(const Call& c) {
  return MAX_TILE_ROWS * int64_t(c.keys.padded()) + 2 * BLOCK_KEYS * int64_t(c.keys.padded() + c.values.padded());
}
inline int64_t tile_floats(const Call& c) { return split_floats(c) + 2 * merge_floats(c); }

const AttentionKernels& attention_portable();
const AttentionKernels& attention_avx2();
const AttentionKernels& attention_avx512();
inline const AttentionKernels& attention_kernels() { return JINFER_DISPATCH(attention); }

}  // namespace jinfer
