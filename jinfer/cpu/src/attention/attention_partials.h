// Flash-decoding partials: softmax state of one split of the keys, and its merging.
//
// A partial row has partial_floats(): maximum score, sum of weights and, from index 16, the
// weighted sum of values.
#pragma once

#include "attention/kv_quant.h"

namespace jinfer {
namespace {

constexpr float NO_SCORE = -INFINITY;

// A maximum that can be subtracted from infinite scores without giving NaN.
inline float finite(float highest) { return std::isfinite(highest) ? highest : 0; }

inline bool is_empty(const float* partial) { return partial[0] == NO_SCORE && partial[1] == 0; }

// Merges a partial into those before it; an empty one changes nothing.
__attribute__((noinline)) void merge_partial(const float* partial, int dim, float* sum) {
  if (is_empty(partial)) return;
  if (is_empty(sum)) {
    std::copy(partial, partial + 16 + dim, sum);
    return;
  }
  const float now = std::max(sum[0], partial[0]), base = finite(now);
  auto factor = [base](float highest) { return highest == base ? 1 : std::exp(highest - base); };
  const float before = factor(sum[0]), here = factor(partial[0]);
  sum[0] = now;
  sum[1] = sum[1] * before + partial[1] * here;
  for (int d = 16; d < 16 + dim; d += LANES)
    store(sum + d, load(sum + d) * before + load(partial + d) * here);
}

void clear_partials(const Call& call, const Tile& tile, float* sum) {
  std::fill(sum, sum + tile.rows * partial_floats(call), 0.0f);
  for (int r = 0; r < tile.rows; ++r) sum[r * partial_floats(call)] = NO_SCORE;
}

void merge_rows(const Call& call, const Tile& tile, const float* partial, float* sum) {
  const int64_t row = partial_floats(call);
  for (int r = 0; r < tile.rows; ++r)
    merge_partial(partial + r * row, call.values.padded(), sum + r * row);
}

// Normalizes rows by the sum of their weights, the sink's included, and writes the results.
void normalize(const Call& call, const Tile& tile, float* sums) {
  const int group = call.group;
  const int dim = call.values.dim;
  for (int r = 0; r < tile.rows; ++r) {
    float* row = sums + r * partial_floats(call);
    const float highest = row[0], total = row[1];
    float factor = total == 0 || call.sums ? 1 : 1 / total;
    if (call.rules.sinks) {
      const float sink = call.rules.sinks[tile.head * group + r % group];
      const float base = finite(std::max(highest, sink));
      const float mine = std::exp(highest - base);
      const float all = total * mine + std::exp(sink - base);
      factor = all == 0 ? 0 : mine / all;
    }
    for (int d = 16; d < 16 + call.values.padded(); d += LANES)
      store(row + d, load(row + d) * factor);
    const int64_t query = call.row_of(tile, r), at = query * dim;
    if (call.sums) std::copy(row, row + 2, call.sums + 2 * query);
    const DType dtype = call.out_dtype();
    from_floats(dtype, row + 16, dim, static_cast<char*>(call.out) + at * bytes_of(dtype));
  }
}

void merge(const Call& call, const Tile& tile, const float* partial, float* sum) {
  clear_partials(call, tile, sum);
  for (int split = tile.first_split(); split < tile.end_split(); ++split) {
    merge_rows(call, tile, partial, sum);
    partial += tile.rows * partial_floats(call);
  }
  normalize(call, tile, sum);
}

}  // namespace
}  // namespace jinfer
