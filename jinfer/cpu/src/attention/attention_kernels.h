// Attention of one tile: FlashAttention-style online softmax, compiled once per instruction set.
//
// A tile walks over its keys in blocks and keeps a running maximum and sum of the softmax (arXiv
// 2112.05682), restarted for each split of SPLIT_KEYS positions; splits are merged in order. Blocks
// and splits begin at fixed positions, and a key's lane follows from its position. So a row's bits
// depend on its query, keys and values alone, not on the tile or the thread.
#pragma once

#include "attention/attention_int8_cache.h"
#include "attention/attention_old_split.h"
#include "attention/attention_partials.h"
#include "attention/attention_products.h"
#include "simd/elementary.h"

namespace jinfer {
namespace {

// Online softmax state of a tile's rows within a split.
struct SoftmaxState {
  const Call& call;
  int rows, key_dim, value_dim;  // dims padded to whole vectors
  float *q, *partial, *scores;   // `partial` is rows of partial_floats
  float highest[MAX_TILE_ROWS];
  alignas(64) float total[MAX_TILE_ROWS * LANES];  // per lane, summed at the end
  int first[MAX_TILE_ROWS], end[MAX_TILE_ROWS];    // keys of each row
  int positions[MAX_TILE_ROWS];
  float slopes[MAX_TILE_ROWS];
  const float* by_distance[MAX_TILE_ROWS];

  SoftmaxState(const Call& call, int rows, float* q, float* partial)
      : call(call),
        rows(rows),
        key_dim(call.keys.padded()),
        value_dim(call.values.padded()),
        q(q),
        partial(partial) {}

  float* out_of(int row) const { return partial + row * partial_floats(call) + 16; }
};

// Turns a block's scores into softmax weights, in place; returns the factor that rescales earlier
// sums.
__attribute__((noinline)) float online_softmax(SoftmaxState& state, int row, int start,
                                               float* scores) {
  const ScoreRules& rules = state.call.rules;
  const int first = std::max(state.first[row] - start, 0);
  const int end = std::min(state.end[row] - start, BLOCK_KEYS);
  if (first >= end) {
    std::fill(scores, scores + BLOCK_KEYS, 0.0f);
    return 1;
  }
  Floats s[BLOCK_KEYS / LANES];
#pragma GCC unroll 16
  for (int i = 0; i < BLOCK_KEYS / LANES; ++i) s[i] = load(scores + i * LANES);
  if (rules.softcap > 0)
    for (Floats& x : s) x = rules.softcap * hyperbolic_tangent(x / rules.softcap);
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  if (rules.by_distance) {
    const int64_t max_distance = rules.lowest + rules.distances - 1;
    const int64_t at = start - state.positions[row] + max_distance + BLOCK_KEYS;
    const float* bias = state.by_distance[row] +
                        std::max<int64_t>(0, std::min<int64_t>(at, rules.distances + BLOCK_KEYS));
    for (int i = 0; i < BLOCK_KEYS / LANES; ++i) s[i] += load(bias + i * LANES);
  }
  if (rules.slopes) {
    Ints distance = state.positions[row] - start - lane;
    for (Floats& x : s) {
      x -= state.slopes[row] * __builtin_convertvector(distance, Floats);
      distance -= LANES;
    }
  }
  if (first > 0 || end < BLOCK_KEYS) {
    Ints at = lane;
    for (Floats& x : s) {
      x = (at >= first) & (at < end) ? x : broadcast(NO_SCORE);
      at += LANES;
    }
  }
  const int seen = (end + LANES - 1) / LANES;  // vectors of scores
  Floats max_value = s[0];
#pragma GCC unroll 1
  for (int i = 1; i < seen; ++i) max_value = larger(max_value, s[i]);
  const float before = state.highest[row];
  const float now = larger(max_lane(max_value), broadcast(before))[0];
  const Floats base = broadcast(finite(now));
  Floats sum = {};
#pragma GCC unroll 1
  for (int i = 0; i < seen; ++i) {
    Floats weight = exponential(s[i] - base);
    store(scores + i * LANES, weight);
    sum += weight;
  }
  std::fill(scores + seen * LANES, scores + BLOCK_KEYS, 0.0f);
  const Floats rescale = exponential(broadcast(before) - base);
  state.highest[row] = now;
  float* total = state.total + row * LANES;
  store(total, load(total) * rescale + sum);
  return rescale[0];
}

// Calls f(vectors, stride) with a block's keys or values as stored, if kernels can compute with
// that type directly.
template <class F>
inline bool with_plain_vectors(const CachedVectors& cache, int64_t vector, F f) {
  if (cache.dim != cache.padded()) return false;
  const int64_t at = vector * cache.dim;
  switch (cache.dtype) {
    case DType::f32: f(static_cast<const float*>(cache.data) + at); return true;
    case DType::bf16: f(static_cast<const BFloat16*>(cache.data) + at); return true;
    case DType::f16: f(static_cast<const Float16*>(cache.data) + at); return true;
    default: return false;
  }
}

// Calls f(vectors, ahead, first, count) for vectors first .. first + count of a block, as stored or
// a chunk at a time through scratch memory. `then`, used next, is `ahead` of them, for prefetching.
template <class F>
inline void for_chunks(const CachedVectors& cache, int64_t vector, const char* then, int count,
                       float* chunk, F f) {
  auto use = [&](const auto* x) {
    f(x, (then - reinterpret_cast<const char*>(x)) / int64_t(sizeof *x), 0, count);
  };
  if (with_plain_vectors(cache, vector, use)) return;
  for (int j = 0; j < count; j += CHUNK) {
    const int vectors = std::min(CHUNK, count - j);
    f(read(cache, vector + j, vectors, chunk), 0, j, vectors);
  }
}

// A block of keys and values, transposed or converted lazily for many rows.
struct Block {
  const Call& call;
  int64_t vector, next;  // index of its first vector, and of the next block's
  int start, count;
  float *chunk, *columns, *rows;  // scratch memory
  bool transposed = false;
  const float* values = nullptr;

  const float* transposed_keys() {
    const int dim = call.keys.padded();
    if (!transposed && call.keys.dtype == DType::quantized)
      transpose_keys(call.keys, vector, count, words(), columns);
    else if (!transposed)
      for_chunks(call.keys, vector, call.keys.at(vector), count, chunk,
                 [&](const auto* keys, int64_t, int first, int vectors) {
                   transpose_keys(keys, dim, vectors, dim, columns + first);
                 });
    transposed = true;
    return columns;
  }

  // Memory to prefetch while keys are used (the values), and while values are used (the next keys).
  const char* after_keys() const {
    return call.shared ? call.keys.at(next) : call.values.at(vector);
  }
  const char* after_values() const { return call.keys.at(next); }

  Words* words() { return reinterpret_cast<Words*>(chunk); }

  const float* float_values() {
    if (values) return values;
    const CachedVectors& cache = call.values;
    values = cache.dtype == DType::f32 && cache.dim == cache.padded()
                 ? static_cast<const float*>(cache.data) + vector * cache.dim
                 : read(cache, vector, count, rows);
    return values;
  }

  // Whether all values first..end are finite.
  bool are_finite(int first, int end) {
    const int dim = call.values.padded();
    const float* x = float_values();
    Floats sum = {};
    for (int64_t i = int64_t(first) * dim; i < int64_t(end) * dim; i += LANES)
      sum += load(x + i) * 0.0f;
    return sum_lanes(sum) == 0;
  }
};

// Attends to a block for rows row .. row + M of a tile; `few`: the tile has few rows.
template <int M>
void attend_block(SoftmaxState& state, Block& block, int row, bool few) {
  const int start = block.start;
  int first = state.first[row], end = state.end[row];
  bool equal = true;
  auto clipped = [&](int key) { return std::max(0, std::min(key - start, block.count)); };
  for (int m = 1; m < M; ++m) {
    const int mine = state.first[row + m], stop = state.end[row + m];
    equal &= clipped(mine) == clipped(state.first[row]) && clipped(stop) == clipped(state.end[row]);
    first = std::min(first, mine), end = std::max(end, stop);
  }
  first = clipped(first), end = clipped(end);
  if (first >= end) return;
  // Rows with other key ranges than their neighbours give those keys weight 0, but 0 times a value
  // that is not finite would be NaN.
  if (M > 1 && !equal && !block.are_finite(first, end)) {
    for (int m = 0; m < M; ++m) attend_block<1>(state, block, row + m, few);
    return;
  }
  const Call& call = state.call;
  const float* q = state.q + int64_t(row) * state.key_dim;
  float* scores = state.scores;
  float keep[M];
  if (few && call.keys.dtype != DType::quantized) {  // decoding transposes anyway
    for_chunks(call.keys, block.vector, block.after_keys(), end, block.chunk,
               [&](const auto* keys, int64_t ahead, int j, int vectors) {
                 scores_in_place<M>(q, state.key_dim, keys, state.key_dim, ahead, vectors,
                                    state.key_dim, scores + j);
               });
  } else {
    scores_of_transposed<M>(q, state.key_dim, block.transposed_keys(), state.key_dim, scores);
  }
  for (int m = 0; m < M; ++m)
    keep[m] = online_softmax(state, row + m, start, scores + m * BLOCK_KEYS);
  const int dim = state.value_dim;
  if (few) {
    for_chunks(call.values, block.vector + first, block.after_values(), end - first, block.chunk,
               [&](const auto* values, int64_t ahead, int j, int vectors) {
                 accumulate_values<M, true>(scores + first + j, values, dim, ahead, vectors, dim,
                                            keep, state.out_of(row), partial_floats(call));
                 for (float& factor : keep) factor = 1;
               });
  } else {
    accumulate_values<M, false>(scores + first, block.float_values() + int64_t(first) * dim, dim, 0,
                                end - first, dim, keep, state.out_of(row), partial_floats(call));
  }
}

// Converts the tile's queries to scaled floats, padded to whole vectors.
void read_queries(const Call& call, const Tile& tile, float* q) {
  const int group = call.group;
  const int dim = call.keys.dim, padded = call.keys.padded();
  for (int r = 0; r < tile.rows; ++r, q += padded) {
    const int64_t at = call.row_of(tile, r) * dim;
    to_floats(call.dtype, static_cast<const char*>(call.q) + at * bytes_of(call.dtype), dim, q);
    std::fill(q + dim, q + padded, 0.0f);
    for (int d = 0; d < padded; d += LANES) store(q + d, load(q + d) * call.rules.scale);
  }
}

// Computes one split of a tile in floats into rows of partial_floats().
void attend_float_split(const Call& call, const Tile& tile, int split, float* q, float* partial,
                        float* scratch) {
  const int group = call.group;
  const int rows = tile.rows;
  const int begin = std::max(tile.first, split * SPLIT_KEYS),
            stop = std::min(tile.end, (split + 1) * SPLIT_KEYS);
  auto reserve = [&scratch](int64_t count) { return (scratch += count) - count; };
  SoftmaxState state(call, rows, q, partial);
  float* chunk = reserve(CHUNK * int64_t(std::max(state.key_dim, state.value_dim)));
  float* columns = reserve(BLOCK_KEYS * int64_t(state.key_dim));
  float* value_rows = reserve(BLOCK_KEYS * int64_t(state.value_dim));
  alignas(64) float scores[MR * BLOCK_KEYS];
  state.scores = scores;
  for (int r = 0; r < rows; ++r) {
    const int64_t token = tile.token + r / group, head = tile.head * group + r % group;
    call.seen(token, &state.first[r], &state.end[r]);
    state.first[r] = std::max(state.first[r], begin), state.end[r] = std::min(state.end[r], stop);
    state.positions[r] = call.positions[token];
    state.slopes[r] = call.rules.slopes ? call.rules.slopes[head] : 0;
    state.by_distance[r] = call.rules.by_distance + head * (call.rules.distances + 2 * BLOCK_KEYS);
    state.highest[r] = NO_SCORE;
    store(state.total + r * LANES, Floats{});
    std::fill(state.out_of(r), state.out_of(r) + state.value_dim, 0.0f);
  }

  const int64_t sequence = call.rows[tile.token];
  const int heights = (rows + MR - 1) / MR, tall = (rows + heights - 1) / heights;
  for (int start = begin / BLOCK_KEYS * BLOCK_KEYS; start < stop; start += BLOCK_KEYS) {
    int count = 0;  // keys of the block that any row sees; there may be no block if none does
    for (int r = 0; r < rows; ++r)
      if (state.first[r] < std::min(state.end[r], start + BLOCK_KEYS) && state.end[r] > start)
        count = std::max(count, std::min(state.end[r] - start, BLOCK_KEYS));
    if (count == 0) continue;
    if (call.block(sequence, start) == NOT_LOCAL) continue;
    const int64_t vector = call.vector(sequence, tile.head, start);
    const bool more =
        start + BLOCK_KEYS < stop && call.block(sequence, start + BLOCK_KEYS) != NOT_LOCAL;
    const int64_t next = more ? call.vector(sequence, tile.head, start + BLOCK_KEYS) : vector;
    // Many rows are compute-bound; few rows prefetch plain vectors while they compute.
    if (more && (rows <= FEW_ROWS ? !call.keys.streams() : rows <= 4 * FEW_ROWS)) {
      const int then = std::min(stop - start - BLOCK_KEYS, BLOCK_KEYS);
      prefetch(call.keys, next, then);
      if (!call.shared) prefetch(call.values, next, then);
    }
    Block block{call, vector, next, start, count, chunk, columns, value_rows};
    for (int row = 0; row < rows; row += tall)
      dispatch_count(std::min(tall, rows - row),
                     [&](auto m) { attend_block<m.value>(state, block, row, rows <= FEW_ROWS); });
  }
  for (int r = 0; r < rows; ++r) {
    float* to = partial + r * partial_floats(call);
    to[0] = state.highest[r], to[1] = sum_lanes(load(state.total + r * LANES));
  }
}

// Computes one split of a tile into rows of partial_floats(); rows for which it is old in integers.
void attend_split(const Call& call, const Tile& tile, int split, const NextSplit& next, float* q,
                  float* partial, float* scratch) {
  const int group = call.group;
  const auto is_int8 = [&](int row) {
    return has_int8(call) && is_old(call, tile.token + row / group, split);
  };
  Tile part = tile;
  for (int r = 0; r < tile.rows; r += part.rows) {
    const bool old = is_int8(r);
    part.token = tile.token + r / group, part.rows = group;
    while (r + part.rows < tile.rows && is_int8(r + part.rows) == old) part.rows += group;
    float *queries = q + r * int64_t(call.keys.padded()), *to = partial + r * partial_floats(call);
    if (old)
      attend_old_split(call, part, split, next, queries, to, scratch);
    else
      attend_float_split(call, part, split, queries, to, scratch);
  }
}

// For few rows, prefetches the first block of a split in numbers: its keys, and its values unless
// those are prefetched while keys are used.
void prefetch_split(const Call& call, const Tile& tile, int split) {
  const int begin = std::max(tile.first, split * SPLIT_KEYS),
            stop = std::min(tile.end, (split + 1) * SPLIT_KEYS);
  const int64_t sequence = call.rows[tile.token];
  if (reads_int8_keys(call, tile, split)) return;
  if (tile.rows > FEW_ROWS || begin >= stop || call.block(sequence, begin) == NOT_LOCAL) return;
  const int start = begin / BLOCK_KEYS * BLOCK_KEYS, count = std::min(stop - start, BLOCK_KEYS);
  const int64_t vector = call.vector(sequence, tile.head, start);
  prefetch(call.keys, vector, count);
  if (!call.keys.streams() && !call.shared) prefetch(call.values, vector, count);
}

void run_split(const Call& call, const Tile& tile, int split, const NextSplit& next, float* partial,
               float* scratch) {
  float* q = scratch;
  prefetch_split(call, tile, split);
  read_queries(call, tile, q);
  attend_split(call, tile, split, next, q, partial, q + int64_t(tile.rows) * call.keys.padded());
}

// Writes a token's key and value of one head to its slot.
void write_token(const Call& call, int64_t token, int64_t head, float* x) {
  if (call.block(call.rows[token], call.positions[token]) == NOT_LOCAL) return;
  const int64_t vector = call.vector(call.rows[token], head, call.positions[token]);
  auto put = [&](const CachedVectors& cache, const void* from) {
    const int64_t at = (token * call.kv_heads + head) * cache.dim;
    to_floats(call.dtype, static_cast<const char*>(from) + at * bytes_of(call.dtype), cache.dim, x);
    write_vector(cache, vector, x);
  };
  if (call.int8_keys) int8_block(call, vector).clear();
  put(call.keys, call.k);
  if (!call.shared) put(call.values, call.v);
}

void run_tile(const Call& call, const Tile& tile, float* scratch) {
  const int64_t row = partial_floats(call), floats = tile.rows * row;
  float *sum = scratch, *partial = sum + floats, *q = partial + floats;
  float* rest = q + int64_t(tile.rows) * call.keys.padded();
  const int first = tile.first_split(), end = tile.end_split();
  prefetch_split(call, tile, first);
  for (int64_t t = 0; call.writes_in_tile && t < tile.rows / call.group; ++t)
    write_token(call, tile.token + t, tile.head, scratch);
  read_queries(call, tile, q);
  if (end - first == 1) {
    attend_split(call, tile, first, {tile, first}, q, sum, rest);
    for (int r = 0; r < tile.rows; ++r)
      if (is_empty(sum + r * row)) std::fill(sum + r * row + 16, sum + (r + 1) * row, 0.0f);
  } else {
    clear_partials(call, tile, sum);
    for (int split = first; split < end; ++split) {
      if (split > first) prefetch_split(call, tile, split);
      attend_split(call, tile, split, {tile, std::min(split + 1, end - 1)}, q, partial, rest);
      merge_rows(call, tile, partial, sum);
    }
  }
  normalize(call, tile, sum);
}

const AttentionKernels kAttention = {write_token, write_int8_split, run_split, merge, run_tile};

}  // namespace
}  // namespace jinfer
