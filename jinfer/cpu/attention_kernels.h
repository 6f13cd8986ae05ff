// Attention of one tile, for the instructions that the including file is compiled for.
//
// A tile walks over its keys in blocks and keeps a running maximum and sum of the softmax (arXiv
// 2112.05682); products keep their sums in registers.
#pragma once

#include "kept.h"

namespace jinfer {
namespace {

constexpr int FEW = TALL;  // rows up to which keys are not transposed
constexpr int SOME = 16;   // vectors decoded at a time: they stay in the fastest memory
constexpr float NEVER = -INFINITY;

static_assert(KEYS % (WIDE * LANES) == 0 && SOME % LANES == 0, "blocks are of whole tiles");

// scores[m][j] = q[m] . keys[j], for keys as columns: [dim][KEYS].
template <int M>
void scores_of_columns(const float* q, int q_stride, const float* keys, int dim, float* scores) {
  for (int n = 0; n < KEYS; n += WIDE * LANES) {
    Floats sum[M][WIDE] = {};
    for (int d = 0; d < dim; ++d) {
      Floats k[WIDE];
#pragma GCC unroll 8
      for (int w = 0; w < WIDE; ++w) k[w] = load(keys + d * KEYS + n + w * LANES);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        Floats x = all(q[m * q_stride + d]);
#pragma GCC unroll 8
        for (int w = 0; w < WIDE; ++w) sum[m][w] += x * k[w];
      }
    }
    for (int m = 0; m < M; ++m)
      for (int w = 0; w < WIDE; ++w) store(scores + m * KEYS + n + w * LANES, sum[m][w]);
  }
}

// The same for keys as rows, one query; scores from count on are not set.
void scores_of_rows(const float* q, const float* keys, int stride, int count, int dim,
                    float* scores) {
  int j = 0;
  for (; j + LANES <= count; j += LANES, keys += LANES * stride) {
    Floats sum[LANES] = {};
    for (int d = 0; d < dim; d += LANES) {
      Floats x = load(q + d);
      const float* key = keys + d;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i, key += stride) sum[i] += x * load(key);
    }
    store(scores + j, sums(sum));
  }
  for (; j < count; ++j, keys += stride) {
    Floats sum = {};
    for (int d = 0; d < dim; d += LANES) sum += load(q + d) * load(keys + d);
    scores[j] = total(sum);
  }
}

// out[m] = out[m] * keep[m] + sum over j of weights[m][j] * values[j].
template <int M, int W>
void add_some(const float* weights, const float* values, int stride, int count, const float* keep,
              float* out, int out_stride) {
  Floats sum[M][W];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sum[m][w] = load(out + m * out_stride + w * LANES) * keep[m];
  for (int j = 0; j < count; ++j) {
    Floats v[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) v[w] = load(values + int64_t(j) * stride + w * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Floats x = all(weights[m * KEYS + j]);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) sum[m][w] += x * v[w];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) store(out + m * out_stride + w * LANES, sum[m][w]);
}

template <int M>
void add_values(const float* weights, const float* values, int stride, int count, int dim,
                const float* keep, float* out, int out_stride) {
  int d = 0;
  for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
    add_some<M, WIDE>(weights, values + d, stride, count, keep, out + d, out_stride);
  for (; d < dim; d += LANES)
    add_some<M, 1>(weights, values + d, stride, count, keep, out + d, out_stride);
}

// Keys [count][stride], up to SOME, as columns [dim][KEYS]; those from count on repeat the last.
void to_columns(const float* keys, int stride, int count, int dim, float* columns) {
  for (int j = 0; j < SOME; j += LANES)
    for (int d = 0; d < dim; d += LANES) {
      Floats x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        x[i] = load(keys + int64_t(std::min(j + i, count - 1)) * stride + d);
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store(columns + (d + i) * KEYS + j, x[i]);
    }
}

// What the rows of a tile have seen so far.
struct Walk {
  int key_dim, value_dim;  // padded to whole vectors
  float *q, *out, *highest;
  float* total;  // in lanes, to be summed at the end
  int *first, *end;  // keys each row sees
  float* slopes;
  int* positions;
};

// Scores to weights, in place; `keep` is what the sums so far are to be multiplied by.
void soften(const Call& call, const Walk& walk, int row, int start, int count, float* scores,
            float* keep) {
  const Sight& sight = call.sight;
  Floats s[KEYS / LANES];
#pragma GCC unroll 16
  for (int i = 0; i < KEYS / LANES; ++i) s[i] = load(scores + i * LANES);
  if (sight.softcap > 0)
    for (Floats& x : s) x = sight.softcap * hyperbolic_tangent(x / sight.softcap);
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  if (sight.slopes) {
    Ints distance = walk.positions[row] - start - lane;
    for (Floats& x : s) {
      x -= walk.slopes[row] * __builtin_convertvector(distance, Floats);
      distance -= LANES;
    }
  }
  const int first = std::max(walk.first[row] - start, 0);
  const int end = std::min(walk.end[row] - start, count);
  if (first > 0 || end < KEYS) {
    Ints at = lane;
    for (Floats& x : s) {
      x = (at >= first) & (at < end) ? x : all(NEVER);
      at += LANES;
    }
  }
  Floats most = s[0];
#pragma GCC unroll 16
  for (int i = 1; i < KEYS / LANES; ++i) most = larger(most, s[i]);
  const Floats before = all(walk.highest[row]), now = larger(highest(most), before);
  if (now[0] == NEVER) {
    for (int j = 0; j < KEYS; j += LANES) store(scores + j, Floats{});
    *keep = 1;
    return;
  }
  Floats sum = {};
#pragma GCC unroll 16
  for (int i = 0; i < KEYS / LANES; ++i) {
    Floats weight = exponential(s[i] - now);
    store(scores + i * LANES, weight);
    sum += weight;
  }
  const Floats kept = exponential(before - now);
  *keep = kept[0];
  walk.highest[row] = now[0];
  float* total = walk.total + row * LANES;
  store(total, load(total) * kept + sum);
}

// Keys start..start + count for M rows: keys as columns, values as rows.
template <int M>
void many(const Call& call, const Walk& walk, int row, const float* keys, const float* values,
          int value_stride, int start, int count) {
  alignas(64) float scores[M * KEYS];
  float keep[M];
  int first = walk.first[row], end = walk.end[row];
  for (int m = 1; m < M; ++m) {
    first = std::min(first, walk.first[row + m]);
    end = std::max(end, walk.end[row + m]);
  }
  count = std::min(count, end - start);
  const int skipped = std::max(first - start, 0);
  if (skipped >= count) return;
  const float* q = walk.q + int64_t(row) * walk.key_dim;
  scores_of_columns<M>(q, walk.key_dim, keys, walk.key_dim, scores);
  for (int m = 0; m < M; ++m)
    soften(call, walk, row + m, start, count, scores + m * KEYS, keep + m);
  add_values<M>(scores + skipped, values + int64_t(skipped) * value_stride, value_stride,
                count - skipped, walk.value_dim, keep, walk.out + int64_t(row) * walk.value_dim,
                walk.value_dim);
}

// Keys start..start + count for all M rows of a tile, a few vectors at a time.
template <int M>
void few(const Call& call, const Walk& walk, int64_t vectors, int start, int count, float* some) {
  alignas(64) float scores[M * KEYS];
  float keep[M];
  for (int j = 0; j < count; j += SOME) {
    const int part = std::min(SOME, count - j);
    int stride = walk.key_dim;
    const float* keys = read(call.keys, vectors + start + j, part, some, &stride);
    for (int m = 0; m < M; ++m)
      scores_of_rows(walk.q + m * walk.key_dim, keys, stride, part, walk.key_dim,
                     scores + m * KEYS + j);
  }
  for (int m = 0; m < M; ++m) soften(call, walk, m, start, count, scores + m * KEYS, keep + m);
  for (int j = 0; j < count; j += SOME) {
    const int part = std::min(SOME, count - j);
    int stride = walk.value_dim;
    const float* values = read(call.values, vectors + start + j, part, some, &stride);
    add_values<M>(scores + j, values, stride, part, walk.value_dim, keep, walk.out, walk.value_dim);
    for (float& factor : keep) factor = 1;
  }
}

// f(std::integral_constant<int, n>) for 1 <= n <= TALL.
template <class F>
void counted(int n, F f) {
  static_assert(TALL == 6, "the cases below are all there are");
  switch (n) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
  }
}

// A finished row: divided by the sum of its weights, with the sink's among them.
void finish(const Call& call, int64_t b, int64_t token, int64_t head, const float* out,
            float highest, float total, float* row) {
  int dim = call.values.dim;
  float factor = 1;
  if (call.sight.sinks) {
    float sink = call.sight.sinks[head], now = std::max(highest, sink);
    if (highest == NEVER) {
      factor = 0;
    } else {
      factor = std::exp(highest - now);
      factor /= total * factor + std::exp(sink - now);
    }
  } else if (total > 0) {
    factor = 1 / total;
  }
  for (int d = 0; d < dim; ++d) row[d] = out[d] * factor;
  int64_t at = ((b * call.tokens + token) * call.heads + head) * dim;
  from_floats(call.kind, row, dim, static_cast<char*>(call.out) + at * bytes_of(call.kind));
}

void run(const Call& call, const Tile& tile, float* partial, float* scratch) {
  const int64_t group = call.group();
  const int rows = tile.rows, dim = call.keys.dim;
  Walk walk;
  walk.key_dim = call.keys.padded();
  walk.value_dim = call.values.padded();
  auto take = [&scratch](int64_t count) { return (scratch += count) - count; };
  walk.q = take(int64_t(rows) * walk.key_dim);
  walk.out = take(int64_t(rows) * walk.value_dim);
  float* some = take(SOME * int64_t(std::max(walk.key_dim, walk.value_dim)));
  float* key_columns = take(KEYS * int64_t(walk.key_dim));
  float* value_rows = take(KEYS * int64_t(walk.value_dim));
  float* row_out = take(walk.value_dim);
  alignas(64) float highest[ROWS], sums[ROWS * LANES], slopes[ROWS];
  int first[ROWS], end[ROWS], positions[ROWS];
  walk.highest = highest, walk.total = sums, walk.slopes = slopes;
  walk.first = first, walk.end = end, walk.positions = positions;

  for (int r = 0; r < rows; ++r) {
    int64_t token = tile.token + r / group, head = tile.head * group + r % group;
    float* q = walk.q + int64_t(r) * walk.key_dim;
    int64_t at = ((tile.b * call.tokens + token) * call.heads + head) * dim;
    to_floats(call.kind, static_cast<const char*>(call.q) + at * bytes_of(call.kind), dim, q);
    for (int d = 0; d < dim; ++d) q[d] *= call.sight.scale;
    for (int d = dim; d < walk.key_dim; ++d) q[d] = 0;
    call.seen(tile.b, token, &first[r], &end[r]);
    first[r] = std::max(first[r], tile.first), end[r] = std::min(end[r], tile.end);
    positions[r] = call.positions[tile.b * call.tokens + token];
    slopes[r] = call.sight.slopes ? call.sight.slopes[head] : 0;
    highest[r] = NEVER;
    store(sums + r * LANES, Floats{});
  }
  std::fill(walk.out, walk.out + int64_t(rows) * walk.value_dim, 0.0f);

  const int64_t vectors = call.vectors(tile.b, tile.head);
  for (int start = tile.first; start < tile.end; start += KEYS) {
    const int count = std::min(KEYS, tile.end - start);
    if (rows <= FEW) {
      counted(rows, [&](auto m) { few<m.value>(call, walk, vectors, start, count, some); });
      continue;
    }
    int stride;
    for (int j = 0; j < count; j += SOME) {
      const int part = std::min(SOME, count - j);
      stride = walk.key_dim;
      const float* keys = read(call.keys, vectors + start + j, part, some, &stride);
      to_columns(keys, stride, part, walk.key_dim, key_columns + j);
    }
    stride = walk.value_dim;
    const float* values = read(call.values, vectors + start, count, value_rows, &stride);
    for (int row = 0; row < rows; row += TALL)
      counted(std::min(TALL, rows - row), [&](auto m) {
        many<m.value>(call, walk, row, key_columns, values, stride, start, count);
      });
  }
  for (int r = 0; r < rows; ++r) {
    const float* out = walk.out + int64_t(r) * walk.value_dim;
    const float sum = total(load(sums + r * LANES));
    if (tile.parts == 1) {
      finish(call, tile.b, tile.token + r / group, tile.head * group + r % group, out, highest[r],
             sum, row_out);
    } else {
      float* to = partial + (tile.at + r) * (walk.value_dim + 2);
      to[0] = highest[r], to[1] = sum;
      std::copy(out, out + walk.value_dim, to + 2);
    }
  }
}

// The parts of a tile's walk, which stand behind one another.
void merge(const Call& call, const Tile& tile, const float* partial, float* sum) {
  const int dim = call.values.padded();
  const int64_t group = call.group();
  for (int r = 0; r < tile.rows; ++r) {
    float highest = NEVER, total = 0;
    auto part = [&](int p) { return partial + (tile.at + int64_t(p) * tile.rows + r) * (dim + 2); };
    for (int p = 0; p < tile.parts; ++p) highest = std::max(highest, part(p)[0]);
    std::fill(sum, sum + dim, 0.0f);
    for (int p = 0; p < tile.parts; ++p) {
      const float* x = part(p);
      if (x[0] == NEVER) continue;
      float factor = std::exp(x[0] - highest);
      total += x[1] * factor;
      for (int d = 0; d < dim; ++d) sum[d] += x[2 + d] * factor;
    }
    finish(call, tile.b, tile.token + r / group, tile.head * group + r % group, sum, highest, total,
           sum + dim);
  }
}

// New tokens of one row and head into the cache, from position `start` on.
void write_tokens(const Call& call, int64_t b, int64_t head, int64_t start, float* x) {
  auto put = [&](const Kept& kept, const void* from, int64_t t) {
    int64_t at = ((b * call.tokens + t) * call.kv_heads + head) * kept.dim;
    to_floats(call.kind, static_cast<const char*>(from) + at * bytes_of(call.kind), kept.dim, x);
    write(kept, call.vectors(b, head) + start + t, x);
  };
  for (int64_t t = 0; t < call.tokens; ++t) {
    put(call.keys, call.k, t);
    if (!call.shared) put(call.values, call.v, t);
  }
}

const Kernels kernels = {write_tokens, run, merge};

}  // namespace
}  // namespace jinfer
