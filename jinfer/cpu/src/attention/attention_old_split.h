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

  // Of a row's keys up to `end`.
  SplitBlocks(const Call& call, int64_t row, int64_t head, int split, int end) {
    const int begin = split * SPLIT_KEYS, stop = std::min(begin + SPLIT_KEYS, end);
    for (int start = begin; start < stop; start += BLOCK_KEYS)
      if (call.block(row, start) != NOT_LOCAL) vectors[count++] = call.vector(row, head, start);
    for (int b = std::max(count, 1); b <= SPLIT_KEYS / BLOCK_KEYS; ++b) vectors[b] = vectors[b - 1];
  }
  SplitBlocks(const Call& call, const Tile& tile, int split)
      : SplitBlocks(call, call.rows[tile.token], tile.head, split, tile.end) {}
};

// Whether a tile's split is likely to be computed from int8 keys.
inline bool reads_int8_keys(const Call& call, const Tile& tile, int split) {
  return call.int8_keys && has_int8(call) && is_old(call, tile.token, split);
}

// Adds a block's values to the sums of M rows: as words, which many rows share, or as stored.
template <int M>
__attribute__((noinline)) void add_words(const WeightScales& scales, const int32_t* words,
                                         const int32_t* weights, const float* keep,
                                         const float* units, float* out, int64_t stride) {
  const int each = scales.dim, dim = scales.groups * each;
  for (int g = 0; g < scales.groups; ++g)
    for_vectors<NR>(each, [&](auto w, int d) {
      accumulate_words<M, w.value>(weights + g * INT8_ROWS * PAIRS, words + g * each + d, dim, keep,
                                   units + g * LANES, out + g * each + d, stride);
    });
}

template <int M, class Values>
__attribute__((noinline)) void add_stored(const WeightScales& scales, const Values& values,
                                          const char* next, const int32_t* weights,
                                          const float* keep, const float* units, float* out,
                                          int64_t stride) {
  const int each = scales.dim;
  for (int g = 0; g < scales.groups; ++g)
    for_vectors<M <= 4 ? 4 : 2>(each, [&](auto w, int d) {
      accumulate_stored<M, w.value>(weights + g * INT8_ROWS * PAIRS, values, next, g * each + d,
                                    keep, units + g * LANES, out, stride);
    });
}

// An old split of a tile, and where its results go.
template <class Blocks>
struct OldSplit {
  const Call& call;
  const int rows, groups, value_groups;
  const SplitBlocks own, later;
  const bool later_int8;  // whether the later split is likely to be computed from int8 keys
  Int8State state;
  Blocks& blocks;
  Int8Queries queries;

  // Memory to prefetch while block b is computed: the next values, and keys. Ranges take a pass
  // over a split's keys, so that these are prefetched a split ahead, but int8 keys a block ahead.
  const char* next_values(int b) const {
    return (call.shared ? call.keys : call.values).at(next_vector(b));
  }
  const char* later_keys(int b) const {
    if (!blocks.cached) return call.keys.at(later.count ? later.vectors[b] : own.vectors[b]);
    const bool int8 = b + 1 < own.count || later_int8;
    const char* columns = reinterpret_cast<char*>(int8_block(call, next_vector(b)).columns());
    return int8 ? columns : call.keys.at(next_vector(b));
  }
  int64_t next_vector(int b) const {
    const bool last = blocks.cached && b + 1 == own.count && later.count;
    return last ? later.vectors[0] : own.vectors[b + 1];
  }
  // Bytes of a block of keys for each word of its columns.
  int word_bytes() const {
    if (blocks.cached) return 4 * BLOCK_KEYS;
    return int(BLOCK_KEYS * call.keys.stride() * 4 / call.keys.padded());
  }

  // Memory of a split's block b that is read before its keys.
  void prefetch_ranges(const SplitBlocks& split, int b) const {
    const Int8Block block = int8_block(call, split.vectors[b]);
    prefetch_lines(block.data, Int8Block::HEADER);
    if (b == 0) prefetch_lines(block.low(), Int8Block::ranges_bytes(block.dim));
  }

  // Scores of `count` rows with a block's keys, and their largest; prefetches as int8_scores().
  void score(int row, int count, const int32_t* keys, const float* key_scales, const char* later,
             int ahead, float* scores, Floats* max_value) const {
    each_height(count, [&](auto m, int r) {
      int8_scores<m.value, Blocks::scaled>(queries, row + r, keys, key_scales, later, ahead,
                                           scores + r * BLOCK_KEYS, max_value + r);
    });
  }

  // Calls f(M, r) for heights M of neighbouring rows r of `count`.
  template <class F>
  static void each_height(int count, const F& f) {
    const int heights = (count + MR - 1) / MR, tall = (count + heights - 1) / heights;
    for (int r = 0; r < count; r += tall)
      dispatch_count(std::min(tall, count - r), [&](auto m) { f(m, r); });
  }

  // For few rows. Keys are prefetched half while these are rounded, half during scores; int8 keys
  // during scores.
  template <class Reserve>
  void attend_few(const Reserve& reserve, int32_t* keys, float* key_scales) {
    alignas(64) float scores[FEW_ROWS * BLOCK_KEYS], keep[LANES];
    Floats max_value[LANES];
    int32_t* weights =
        reinterpret_cast<int32_t*>(reserve(value_groups * int64_t(INT8_ROWS * PAIRS)));
    float* units = reserve(value_groups * LANES);
    const int ahead = word_bytes() / (blocks.cached ? 1 : 2);
    const int64_t begun = blocks.cached ? 0 : BLOCK_KEYS * call.keys.stride() / 2;
    for (int b = 0; b < own.count; ++b) {
      const char* from = later_keys(b);
      const int32_t* columns = blocks.read_keys(own.vectors[b], from, ahead, keys, key_scales);
      if (blocks.cached && later_int8) prefetch_ranges(later, b);
      score(0, rows, columns, key_scales, from + begun, ahead, scores, max_value);
      const auto values = blocks.read_values(own.vectors[b]);
      state.weigh(0, rows, scores, max_value, blocks.scales, weights, keep, units);
      const char* next = next_values(b);
      each_height(rows, [&](auto m, int r) {
        add_stored<m.value>(blocks.scales, values, next, weights + r * PAIRS, keep + r, units + r,
                            state.sums + r * state.stride + 16, state.stride);
      });
    }
  }

  // For many rows, which share a block's words.
  template <class Reserve>
  void attend_many(const Reserve& reserve, int32_t* keys, float* key_scales) {
    const int dim = blocks.scales.groups * blocks.scales.dim;
    const int64_t pair = 2 * (call.shared ? call.keys : call.values).stride();
    int32_t* words = reinterpret_cast<int32_t*>(reserve(PAIRS * int64_t(dim)));
    int32_t* weights =
        reinterpret_cast<int32_t*>(reserve(value_groups * int64_t(INT8_ROWS * PAIRS)));
    float* units = reserve(value_groups * LANES);
    for (int b = 0; b < own.count; ++b) {
      const int32_t* columns =
          blocks.read_keys(own.vectors[b], later_keys(b), word_bytes(), keys, key_scales);
      const auto values = blocks.read_values(own.vectors[b]);
      const char* next = next_values(b);
      for (int i = 0; i < PAIRS; ++i, next += pair) {
        prefetch_lines(next, pair);
        for (int d = 0; d < dim; d += LANES)
          store_words(words + i * int64_t(dim) + d, (Ints)values.join(i, d));
      }
      for (int row = 0; row < rows; row += INT8_ROWS) {
        const int count = std::min(INT8_ROWS, rows - row);
        alignas(64) float scores[INT8_ROWS * BLOCK_KEYS], keep[LANES];
        Floats max_value[LANES];
        score(row, count, columns, key_scales, nullptr, 0, scores, max_value);
        state.weigh(row, count, scores, max_value, blocks.scales, weights, keep, units);
        each_height(count, [&](auto m, int r) {
          add_words<m.value>(blocks.scales, words, weights + r * PAIRS, keep + r, units + r,
                             state.sums + (row + r) * state.stride + 16, state.stride);
        });
      }
    }
  }
};

// A function that takes whole vectors of floats from scratch memory.
inline auto whole_vectors(float*& scratch) {
  return [&scratch](int64_t count) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    return (scratch += whole) - whole;
  };
}

// Computes an old split of a tile into rows of partial_floats(). Keys of `next` are prefetched.
template <class Blocks>
void attend_old_blocks(const Call& call, const Tile& tile, int split, const NextSplit& next,
                       const float* q, float* partial, float* scratch) {
  static_assert(LANES == 16, "what a partial has before its sums is a vector");
  const int key_dim = call.keys.padded(), value_dim = call.values.padded(), rows = tile.rows;
  const auto reserve = whole_vectors(scratch);
  const auto integers = [&](int64_t count) { return reinterpret_cast<int32_t*>(reserve(count)); };
  Blocks blocks(call, reserve);
  const int words = Blocks::words_of(key_dim), groups = Blocks::groups_of(key_dim);
  const Int8Queries queries{words,
                            groups,
                            integers(int64_t(rows) * words),
                            integers(int64_t(rows) * groups),
                            reserve(rows),
                            reserve(rows)};
  int32_t* keys = integers(words * int64_t(BLOCK_KEYS));
  float* key_scales = reserve(groups * BLOCK_KEYS);
  const int64_t stride = partial_floats(call);
  OldSplit<Blocks> old{call,
                       rows,
                       groups,
                       Blocks::value_groups_of(value_dim),
                       {call, tile, split},
                       {call, next.tile, next.split},
                       reads_int8_keys(call, next.tile, next.split),
                       {partial, stride},
                       blocks,
                       queries};
  Int8State& state = old.state;
  std::fill(state.highest, state.highest + rows + LANES, LOWEST);
  for (int r = 0; r < rows; ++r)
    std::fill(partial + r * stride, partial + r * stride + 16 + value_dim, 0.0f);
  if (old.own.count) blocks.round_queries(q, rows, old.own.vectors, old.own.count, queries);
  if (rows <= FEW_ROWS)
    old.attend_few(reserve, keys, key_scales);
  else
    old.attend_many(reserve, keys, key_scales);
  for (int r = 0; r < rows; ++r) {
    float* to = partial + r * stride;
    const float total = sum_lanes(load(to));
    to[0] = old.own.count ? state.highest[r] * LN_2 : NO_SCORE, to[1] = total;
  }
}

void attend_old_split(const Call& call, const Tile& tile, int split, const NextSplit& next,
                      const float* q, float* partial, float* scratch) {
  const auto attend = call.keys.dtype == DType::quantized ? attend_old_blocks<CodeBlocks>
                      : call.keys.dtype == DType::f16     ? attend_old_blocks<NumberBlocks<Float16>>
                                                      : attend_old_blocks<NumberBlocks<BFloat16>>;
  attend(call, tile, split, next, q, partial, scratch);
}

template <class T>
void write_int8_numbers(const Call& call, const SplitBlocks& blocks, float* scratch) {
  NumberBlocks<T> numbers(call, whole_vectors(scratch));
  if (blocks.count == SPLIT_KEYS / BLOCK_KEYS) numbers.write_int8_keys(blocks.vectors);
}

void write_int8_split(const Call& call, int64_t row, int split, int64_t head, float* scratch) {
  if (!has_int8(call)) return;
  const SplitBlocks blocks(call, row, head, split, (split + 1) * SPLIT_KEYS);
  if (call.keys.dtype == DType::f16) write_int8_numbers<Float16>(call, blocks, scratch);
  if (call.keys.dtype == DType::bf16) write_int8_numbers<BFloat16>(call, blocks, scratch);
}
#else
inline bool has_int8(const Call&) { return false; }
inline bool reads_int8_keys(const Call&, const Tile&, int) { return false; }
inline void write_int8_split(const Call&, int64_t, int, int64_t, float*) {}
inline void attend_old_split(const Call&, const Tile&, int, const NextSplit&, const float*, float*,
                             float*) {}
#endif

}  // namespace
}  // namespace jinfer
