// Attention over the old keys of a long text, in integers where the processor has them.
//
// A split of SPLIT_KEYS keys is old for a token from position LONG_TEXT on that comes after it and
// sees all of it. So the arithmetic of a row and a split follows from the row's position, and its
// bits are the same in any tile. A shorter text's keys stay in the third-level cache of most
// processors, where one row of each head takes less time in floats.
#pragma once

#include "attention/attention_partials.h"

#if defined(__AVX512VNNI__)
#include "attention/attention_int8_codes.h"
#include "attention/attention_int8_numbers.h"
#endif

namespace jinfer {
namespace {

constexpr int LONG_TEXT = 2048;

// Whether a split is old for a token.
inline bool is_old(const Call& call, int64_t token, int split) {
  int first, end;
  call.seen(token, &first, &end);
  return call.positions[token] >= LONG_TEXT && first <= split * SPLIT_KEYS &&
         (split + 1) * SPLIT_KEYS <= std::min(end, call.positions[token]);
}

#if defined(__AVX512VNNI__)
// Whether old splits are computed in integers: of caches of 16 bits, in whole SIMD vectors, and of
// codes of 8 bits, where scores are the products alone.
inline bool has_int8(const Call& call) {
  const ScoreRules& rules = call.rules;
  const CachedVectors& keys = call.keys;
  const bool kept = keys.dtype == DType::quantized
                        ? keys.format.bits == 8 && keys.format.symmetric
                        : keys.dtype != DType::f32 && keys.streams() && call.values.streams();
  return kept && rules.softcap <= 0 && !rules.slopes && !rules.by_distance;
}

// The blocks of a split that are here: indices of their first vectors; the last one is repeated.
struct SplitBlocks {
  int count = 0;
  int64_t vectors[SPLIT_KEYS / BLOCK_KEYS + 1] = {};

  SplitBlocks(const Call& call, const Tile& tile, int split) {
    const int64_t sequence = call.rows[tile.token];
    const int begin = split * SPLIT_KEYS, stop = std::min(begin + SPLIT_KEYS, tile.end);
    for (int start = begin; start < stop; start += BLOCK_KEYS)
      if (call.block(sequence, start) != NOT_LOCAL)
        vectors[count++] = call.vector(sequence, tile.head, start);
    for (int b = std::max(count, 1); b <= SPLIT_KEYS / BLOCK_KEYS; ++b) vectors[b] = vectors[b - 1];
  }
};

// Adds a block's values to the sums of M rows. `few`: values are rounded as they are used.
template <int M, class Blocks>
__attribute__((noinline)) void add_values(const Blocks& blocks, bool few, const int32_t* weights,
                                          const float* keep, const float* units, float* out,
                                          int64_t stride) {
  const int dim = blocks.scales.groups * blocks.scales.dim, each = blocks.scales.dim;
  for (int g = 0; g < blocks.scales.groups; ++g) {
    const int32_t* own = weights + g * INT8_ROWS * PAIRS;
    const float* unit = units + g * LANES;
    if (few)
      for_vectors<M <= 4 ? 4 : 2>(each, [&](auto w, int d) {
        accumulate_stored<M, w.value>(own, blocks, g * each + d, keep, unit, out, stride);
      });
    else
      for_vectors<NR>(each, [&](auto w, int d) {
        accumulate_words<M, w.value>(own, blocks.words + g * each + d, dim, keep, unit,
                                     out + g * each + d, stride);
      });
  }
}

// Computes an old split of a tile into rows of partial_floats(). Keys of `next` are prefetched.
template <class Blocks>
void attend_old_blocks(const Call& call, const Tile& tile, int split, const NextSplit& next,
                       const float* q, float* partial, float* scratch) {
  static_assert(LANES == 16, "what a partial has before its sums is a vector");
  const int key_dim = call.keys.padded(), value_dim = call.values.padded(), rows = tile.rows;
  const auto reserve = [&scratch](int64_t count) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    return (scratch += whole) - whole;
  };
  const auto integers = [&](int64_t count) { return reinterpret_cast<int32_t*>(reserve(count)); };
  Blocks blocks(call, reserve);
  const int words = Blocks::words_of(key_dim), groups = Blocks::groups_of(key_dim);
  const int value_groups = Blocks::value_groups_of(value_dim);
  const Int8Queries queries{words, groups, integers(int64_t(rows) * words),
                            integers(int64_t(rows) * groups), reserve(rows), reserve(rows)};
  int32_t* keys = integers(words * int64_t(BLOCK_KEYS));
  float* key_scales = reserve(groups * BLOCK_KEYS);
  int32_t* weights = integers(value_groups * int64_t(INT8_ROWS * PAIRS));
  float* units = reserve(value_groups * LANES);
  Int8State state{partial, partial_floats(call)};
  const int64_t stride = state.stride;
  std::fill(state.highest, state.highest + rows + LANES, LOWEST);
  for (int r = 0; r < rows; ++r)
    std::fill(partial + r * stride, partial + r * stride + 16 + value_dim, 0.0f);

  const SplitBlocks own(call, tile, split), later(call, next.tile, next.split);
  const int64_t* vectors = own.vectors;
  const bool few = rows <= FEW_ROWS;
  if (own.count && !call.shared) prefetch(call.values, vectors[0], BLOCK_KEYS);
  if (own.count) blocks.round_queries(q, rows, vectors, own.count, queries);
  for (int b = 0; b < own.count; ++b) {
    blocks.read_keys(vectors[b], later.count ? later.vectors[b] : vectors[b], keys, key_scales);
    blocks.read_values(vectors[b], vectors[b + 1], few);
    for (int row = 0; row < rows; row += INT8_ROWS) {
      const int count = std::min(INT8_ROWS, rows - row);
      alignas(64) float scores[INT8_ROWS * BLOCK_KEYS], keep[LANES];
      Floats most[LANES];
      const int heights = (count + MR - 1) / MR, tall = (count + heights - 1) / heights;
      for (int r = 0; r < count; r += tall)
        dispatch_count(std::min(tall, count - r), [&](auto m) {
          int8_scores<m.value, Blocks::scaled>(queries, row + r, keys, key_scales,
                                               scores + r * BLOCK_KEYS, most + r);
        });
      state.weigh(row, count, scores, most, blocks.scales, weights, keep, units);
      for (int r = 0; r < count; r += tall)
        dispatch_count(std::min(tall, count - r), [&](auto m) {
          add_values<m.value>(blocks, few, weights + r * PAIRS, keep + r, units + r,
                              partial + (row + r) * stride + 16, stride);
        });
    }
  }
  for (int r = 0; r < rows; ++r) {
    float* to = partial + r * stride;
    const float total = sum_lanes(load(to));
    to[0] = own.count ? state.highest[r] * LN_2 : NO_SCORE, to[1] = total;
  }
}

void attend_old_split(const Call& call, const Tile& tile, int split, const NextSplit& next,
                      const float* q, float* partial, float* scratch) {
  const auto attend = call.keys.dtype == DType::quantized ? attend_old_blocks<CodeBlocks>
                      : call.keys.dtype == DType::f16 ? attend_old_blocks<NumberBlocks<Float16>>
                                                      : attend_old_blocks<NumberBlocks<BFloat16>>;
  attend(call, tile, split, next, q, partial, scratch);
}
#else
inline bool has_int8(const Call&) { return false; }
inline void attend_old_split(const Call&, const Tile&, int, const NextSplit&, const float*, float*,
                             float*) {}
#endif

}  // namespace
}  // namespace jinfer
