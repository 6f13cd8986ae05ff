// Attention of one tile, for the instructions that the including file is compiled for.
//
// A tile walks over its keys in blocks and keeps a running maximum and sum of the softmax (arXiv
// 2112.05682), anew for each PART of the positions; the parts are merged in their order. Blocks and
// parts begin at fixed positions, and a key's lane is that of its position: a row's bits depend on
// its query, its keys and its values alone, not on the tile or the thread.
#pragma once

#include "attention/attention_partials.h"
#include "attention/attention_products.h"

namespace jinfer {
namespace {

// What the rows of a tile have seen of a part so far.
struct Walk {
  const Call& call;
  int rows, key_dim, value_dim;  // dims padded to whole vectors
  float *q, *partial, *scores;   // `partial` is rows of partial_floats
  float highest[ROWS];
  alignas(64) float total[ROWS * LANES];  // in lanes, to be summed at the end
  int first[ROWS], end[ROWS];             // keys each row sees
  int positions[ROWS];
  float slopes[ROWS];
  const float* by_distance[ROWS];

  Walk(const Call& call, int rows, float* q, float* partial)
      : call(call),
        rows(rows),
        key_dim(call.keys.padded()),
        value_dim(call.values.padded()),
        q(q),
        partial(partial) {}

  float* out_of(int row) const { return partial + row * partial_floats(call) + 16; }
};

// Scores of a block to weights, in place; returns what the sums so far are to be multiplied by.
__attribute__((noinline)) float soften(Walk& walk, int row, int start, float* scores) {
  const Rules& rules = walk.call.rules;
  const int first = std::max(walk.first[row] - start, 0);
  const int end = std::min(walk.end[row] - start, KEYS);
  if (first >= end) {
    std::fill(scores, scores + KEYS, 0.0f);
    return 1;
  }
  Floats s[KEYS / LANES];
#pragma GCC unroll 16
  for (int i = 0; i < KEYS / LANES; ++i) s[i] = load(scores + i * LANES);
  if (rules.softcap > 0)
    for (Floats& x : s) x = rules.softcap * hyperbolic_tangent(x / rules.softcap);
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  if (rules.by_distance) {
    const int64_t most = rules.lowest + rules.distances - 1;
    const int64_t at = start - walk.positions[row] + most + KEYS;
    const float* bias = walk.by_distance[row] +
                        std::max<int64_t>(0, std::min<int64_t>(at, rules.distances + KEYS));
    for (int i = 0; i < KEYS / LANES; ++i) s[i] += load(bias + i * LANES);
  }
  if (rules.slopes) {
    Ints distance = walk.positions[row] - start - lane;
    for (Floats& x : s) {
      x -= walk.slopes[row] * __builtin_convertvector(distance, Floats);
      distance -= LANES;
    }
  }
  if (first > 0 || end < KEYS) {
    Ints at = lane;
    for (Floats& x : s) {
      x = (at >= first) & (at < end) ? x : all(NEVER);
      at += LANES;
    }
  }
  const int seen = (end + LANES - 1) / LANES;  // vectors of scores
  Floats most = s[0];
#pragma GCC unroll 1
  for (int i = 1; i < seen; ++i) most = larger(most, s[i]);
  const float before = walk.highest[row];
  const float now = larger(highest(most), all(before))[0];
  const Floats base = all(finite(now));
  Floats sum = {};
#pragma GCC unroll 1
  for (int i = 0; i < seen; ++i) {
    Floats weight = exponential(s[i] - base);
    store(scores + i * LANES, weight);
    sum += weight;
  }
  std::fill(scores + seen * LANES, scores + KEYS, 0.0f);
  const Floats kept = exponential(all(before) - base);
  walk.highest[row] = now;
  float* total = walk.total + row * LANES;
  store(total, load(total) * kept + sum);
  return kept[0];
}

// Keys or values of a block where they stand, in the type that they have there, if that can be
// computed with as it is; otherwise f is not called. f(vectors, stride).
template <class F>
inline bool in_place(const Kept& kept, int64_t vector, F f) {
  if (kept.dim != kept.padded()) return false;
  const int64_t at = vector * kept.dim;
  switch (kept.kind) {
    case Kind::f32: f(static_cast<const float*>(kept.data) + at); return true;
    case Kind::bf16: f(static_cast<const Bfloat*>(kept.data) + at); return true;
    case Kind::f16: f(static_cast<const Half*>(kept.data) + at); return true;
    default: return false;
  }
}

// f(vectors, ahead, first, count) for the vectors first .. first + count of a block, in place or a
// few at a time through scratch memory; what is used after them, `then`, stands `ahead` of them.
template <class F>
inline void each(const Kept& kept, int64_t vector, const char* then, int count, float* some, F f) {
  auto use = [&](const auto* x) {
    f(x, (then - reinterpret_cast<const char*>(x)) / int64_t(sizeof *x), 0, count);
  };
  if (in_place(kept, vector, use)) return;
  for (int j = 0; j < count; j += SOME) {
    const int part = std::min(SOME, count - j);
    f(read(kept, vector + j, part, some), 0, j, part);
  }
}

// A block of keys and values as many rows use them, made when first asked for.
struct Block {
  const Call& call;
  int64_t vector, next;  // the first one's, and that of the block after
  int start, count;
  float *some, *columns, *rows;  // scratch memory
  bool turned = false;
  const float* values = nullptr;

  const float* key_columns() {
    const int dim = call.keys.padded();
    if (!turned && call.keys.kind == Kind::codes)
      to_columns(call.keys, vector, count, words(), columns);
    else if (!turned)
      each(call.keys, vector, call.keys.at(vector), count, some,
           [&](const auto* keys, int64_t, int first, int part) {
             to_columns(keys, dim, part, dim, columns + first);
           });
    turned = true;
    return columns;
  }

  // What few rows have fetched while they use the keys: their values; and meanwhile: the next keys.
  const char* after_keys() const {
    return call.shared ? call.keys.at(next) : call.values.at(vector);
  }
  const char* after_values() const { return call.keys.at(next); }

  Words* words() { return reinterpret_cast<Words*>(some); }

  const float* value_rows() {
    if (values) return values;
    const Kept& kept = call.values;
    values = kept.kind == Kind::f32 && kept.dim == kept.padded()
                 ? static_cast<const float*>(kept.data) + vector * kept.dim
                 : read(kept, vector, count, rows);
    return values;
  }

  // Whether all values first..end are finite.
  bool numbers(int first, int end) {
    const int dim = call.values.padded();
    const float* x = value_rows();
    Floats sum = {};
    for (int64_t i = int64_t(first) * dim; i < int64_t(end) * dim; i += LANES)
      sum += load(x + i) * 0.0f;
    return total(sum) == 0;
  }
};

// A block for the rows row .. row + M of a tile, which all have `few` others or many.
template <int M>
void take(Walk& walk, Block& block, int row, bool few) {
  const int start = block.start;
  int first = walk.first[row], end = walk.end[row];
  bool equal = true;
  auto clipped = [&](int key) { return std::max(0, std::min(key - start, block.count)); };
  for (int m = 1; m < M; ++m) {
    const int mine = walk.first[row + m], stop = walk.end[row + m];
    equal &= clipped(mine) == clipped(walk.first[row]) && clipped(stop) == clipped(walk.end[row]);
    first = std::min(first, mine), end = std::max(end, stop);
  }
  first = clipped(first), end = clipped(end);
  if (first >= end) return;
  // Rows that see other keys than their neighbours give theirs weights of 0; a value that is no
  // number would still get through.
  if (M > 1 && !equal && !block.numbers(first, end)) {
    for (int m = 0; m < M; ++m) take<1>(walk, block, row + m, few);
    return;
  }
  const Call& call = walk.call;
  const float* q = walk.q + int64_t(row) * walk.key_dim;
  float* scores = walk.scores;
  float keep[M];
  if (few && call.keys.kind != Kind::codes) {  // to decode codes is to turn them
    each(call.keys, block.vector, block.after_keys(), end, block.some,
         [&](const auto* keys, int64_t ahead, int j, int part) {
           scores_of_few<M>(q, walk.key_dim, keys, walk.key_dim, ahead, part, walk.key_dim,
                            scores + j);
         });
  } else {
    scores_of_columns<M>(q, walk.key_dim, block.key_columns(), walk.key_dim, scores);
  }
  for (int m = 0; m < M; ++m) keep[m] = soften(walk, row + m, start, scores + m * KEYS);
  const int dim = walk.value_dim;
  if (few) {
    each(call.values, block.vector + first, block.after_values(), end - first, block.some,
         [&](const auto* values, int64_t ahead, int j, int part) {
           add_values<M, true>(scores + first + j, values, dim, ahead, part, dim, keep,
                               walk.out_of(row), partial_floats(call));
           for (float& factor : keep) factor = 1;
         });
  } else {
    add_values<M, false>(scores + first, block.value_rows() + int64_t(first) * dim, dim, 0,
                         end - first, dim, keep, walk.out_of(row), partial_floats(call));
  }
}

// The tile's queries as floats, scaled, in rows of whole vectors.
void read_queries(const Call& call, const Tile& tile, float* q) {
  const int group = call.group;
  const int dim = call.keys.dim, padded = call.keys.padded();
  for (int r = 0; r < tile.rows; ++r, q += padded) {
    const int64_t at = call.row_of(tile, r) * dim;
    to_floats(call.kind, static_cast<const char*>(call.q) + at * bytes_of(call.kind), dim, q);
    std::fill(q + dim, q + padded, 0.0f);
    for (int d = 0; d < padded; d += LANES) store(q + d, load(q + d) * call.rules.scale);
  }
}

// One part of a tile to rows of partial_floats.
void walk_part(const Call& call, const Tile& tile, int part, float* q, float* partial,
               float* scratch) {
  const int group = call.group;
  const int rows = tile.rows;
  const int begin = std::max(tile.first, part * PART), stop = std::min(tile.end, (part + 1) * PART);
  auto reserve = [&scratch](int64_t count) { return (scratch += count) - count; };
  Walk walk(call, rows, q, partial);
  float* some = reserve(SOME * int64_t(std::max(walk.key_dim, walk.value_dim)));
  float* columns = reserve(KEYS * int64_t(walk.key_dim));
  float* value_rows = reserve(KEYS * int64_t(walk.value_dim));
  alignas(64) float scores[TALL * KEYS];
  walk.scores = scores;
  for (int r = 0; r < rows; ++r) {
    const int64_t token = tile.token + r / group, head = tile.head * group + r % group;
    call.seen(token, &walk.first[r], &walk.end[r]);
    walk.first[r] = std::max(walk.first[r], begin), walk.end[r] = std::min(walk.end[r], stop);
    walk.positions[r] = call.positions[token];
    walk.slopes[r] = call.rules.slopes ? call.rules.slopes[head] : 0;
    walk.by_distance[r] = call.rules.by_distance + head * (call.rules.distances + 2 * KEYS);
    walk.highest[r] = NEVER;
    store(walk.total + r * LANES, Floats{});
    std::fill(walk.out_of(r), walk.out_of(r) + walk.value_dim, 0.0f);
  }

  const int64_t sequence = call.rows[tile.token];
  const int heights = (rows + TALL - 1) / TALL, tall = (rows + heights - 1) / heights;
  for (int start = begin / KEYS * KEYS; start < stop; start += KEYS) {
    int count = 0;  // keys of the block that somebody sees; where nobody does there may be no block
    for (int r = 0; r < rows; ++r)
      if (walk.first[r] < std::min(walk.end[r], start + KEYS) && walk.end[r] > start)
        count = std::max(count, std::min(walk.end[r] - start, KEYS));
    if (count == 0) continue;
    if (call.block(sequence, start) == ELSEWHERE) continue;
    const int64_t vector = call.vector(sequence, tile.head, start);
    const bool more =
        start + KEYS < stop && call.block(sequence, start + KEYS) != ELSEWHERE;
    const int64_t next = more ? call.vector(sequence, tile.head, start + KEYS) : vector;
    // Many rows compute longer than the next block takes to come; few fetch what is in place while
    // they compute.
    if (more && (rows <= FEW ? !call.keys.streams() : rows <= 4 * FEW)) {
      const int then = std::min(stop - start - KEYS, KEYS);
      fetch(call.keys, next, then);
      if (!call.shared) fetch(call.values, next, then);
    }
    Block block{call, vector, next, start, count, some, columns, value_rows};
    for (int row = 0; row < rows; row += tall)
      counted(std::min(tall, rows - row),
              [&](auto m) { take<m.value>(walk, block, row, rows <= FEW); });
  }
  for (int r = 0; r < rows; ++r) {
    float* to = partial + r * partial_floats(call);
    to[0] = walk.highest[r], to[1] = total(load(walk.total + r * LANES));
  }
}

// For few rows, has the first block of a part fetched: its keys, and its values unless they are
// fetched while the keys are used.
void fetch_part(const Call& call, const Tile& tile, int part) {
  const int begin = std::max(tile.first, part * PART), stop = std::min(tile.end, (part + 1) * PART);
  const int64_t sequence = call.rows[tile.token];
  if (tile.rows > FEW || begin >= stop || call.block(sequence, begin) == ELSEWHERE) return;
  const int start = begin / KEYS * KEYS, count = std::min(stop - start, KEYS);
  const int64_t vector = call.vector(sequence, tile.head, start);
  fetch(call.keys, vector, count);
  if (!call.keys.streams() && !call.shared) fetch(call.values, vector, count);
}

void run_part(const Call& call, const Tile& tile, int part, float* partial, float* scratch) {
  float* q = scratch;
  fetch_part(call, tile, part);
  read_queries(call, tile, q);
  walk_part(call, tile, part, q, partial, q + int64_t(tile.rows) * call.keys.padded());
}

// A token's key and value of one head into their places.
void write_token(const Call& call, int64_t token, int64_t head, float* x) {
  if (call.block(call.rows[token], call.positions[token]) == ELSEWHERE) return;
  const int64_t vector = call.vector(call.rows[token], head, call.positions[token]);
  auto put = [&](const Kept& kept, const void* from) {
    const int64_t at = (token * call.kv_heads + head) * kept.dim;
    to_floats(call.kind, static_cast<const char*>(from) + at * bytes_of(call.kind), kept.dim, x);
    write(kept, vector, x);
  };
  put(call.keys, call.k);
  if (!call.shared) put(call.values, call.v);
}

void run_whole(const Call& call, const Tile& tile, float* scratch) {
  const int64_t row = partial_floats(call), floats = tile.rows * row;
  float *sum = scratch, *partial = sum + floats, *q = partial + floats;
  float* rest = q + int64_t(tile.rows) * call.keys.padded();
  const int first = tile.first_part(), end = tile.end_part();
  fetch_part(call, tile, first);
  for (int64_t t = 0; call.late && t < tile.rows / call.group; ++t)
    write_token(call, tile.token + t, tile.head, scratch);
  read_queries(call, tile, q);
  if (end - first == 1) {
    walk_part(call, tile, first, q, sum, rest);
    for (int r = 0; r < tile.rows; ++r)
      if (saw_nothing(sum + r * row)) std::fill(sum + r * row + 16, sum + (r + 1) * row, 0.0f);
  } else {
    nothing(call, tile, sum);
    for (int part = first; part < end; ++part) {
      if (part > first) fetch_part(call, tile, part);
      walk_part(call, tile, part, q, partial, rest);
      fold_rows(call, tile, partial, sum);
    }
  }
  finish(call, tile, sum);
}

const AttentionKernels kAttention = {write_token, run_part, merge, run_whole};

}  // namespace
}  // namespace jinfer
