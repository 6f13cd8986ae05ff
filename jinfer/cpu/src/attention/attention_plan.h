// Attention plan: divides a call into tiles and splits for threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/attention.h"

namespace jinfer {
namespace {

constexpr int64_t MIN_WORK_PER_THREAD = 1 << 15;  // multiplications
constexpr int TILES_PER_THREAD = 3;               // for load balance
constexpr int MIN_TILE_ROWS = 48;                 // if available: a tile's rows share its keys
constexpr int64_t MAX_PARTIAL_FLOATS = 1 << 24;

// Neighbouring tokens of one sequence; a tile for each key head.
struct TokenRun {
  int64_t token;         // the first
  int rows, first, end;  // of its tiles
  int pieces;            // work items of each tile: its splits, or one
  int64_t item;          // the first work item
  int64_t at;            // offset of the first tile's partial results
};

// Reused from call to call, for its memory: a decoding step makes one or two plans.
class TilePlan {
 public:
  int64_t items;    // work items
  int64_t threads;  // worth using
  int64_t buffer;   // floats of partial results

  struct Piece {
    Tile tile;
    int split;  // -1: the whole tile
  };

  void make(const Call& call, int64_t max_threads) {
    runs_.clear(), split_tiles_.clear(), padding_.clear(), int8_splits_.clear(), taken_.clear();
    if (call.written && call.int8_keys) add_int8_splits(call);
    add_runs(call, max_threads);
    int64_t all = 0;
    for (const TokenRun& run : runs_) all += call.kv_heads * multiplications(call, run);
    threads = std::max<int64_t>(1, std::min(max_threads, all / MIN_WORK_PER_THREAD));
    // Longest first, for load balance.
    const auto longer = [&](const TokenRun& a, const TokenRun& b) {
      return multiplications(call, a) > multiplications(call, b);
    };
    if (!std::is_sorted(runs_.begin(), runs_.end(), longer))
      std::stable_sort(runs_.begin(), runs_.end(), longer);
    items = buffer = 0;
    for (TokenRun& run : runs_) {
      const int splits = tile_of(call, run, 0).splits();
      const int64_t floats = call.kv_heads * splits * run.rows * partial_floats(call);
      const bool whole = threads < 2 || splits < 2 || buffer + floats > MAX_PARTIAL_FLOATS ||
                         multiplications(call, run) * 4 * threads < all;
      run.pieces = whole ? 1 : splits, run.item = items, run.at = buffer;
      items += call.kv_heads * run.pieces;
      if (whole) continue;
      buffer += floats;
      for (int64_t head = 0; head < call.kv_heads; ++head)
        split_tiles_.push_back(tile_of(call, run, head));
    }
  }

  Piece piece(const Call& call, int64_t item) const {
    const auto after =
        std::upper_bound(runs_.begin(), runs_.end(), item,
                         [](int64_t i, const TokenRun& run) { return i < run.item; });
    const TokenRun& run = after[-1];
    const int64_t i = item - run.item;
    // A split's keys of all heads are neighbours in memory.
    const Tile tile = tile_of(call, run, i % call.kv_heads);
    return {tile, run.pieces < 2 ? -1 : tile.first_split() + int(i / call.kv_heads)};
  }

  // Tiles whose splits are separate work items.
  const std::vector<Tile>& split_tiles() const { return split_tiles_; }

  // Complete splits of long texts whose int8 keys are to be written, unless they are there.
  struct Int8Split {
    int64_t row;
    int split;
  };
  const std::vector<Int8Split>& int8_splits() const { return int8_splits_; }

  // Padding tokens.
  const std::vector<int64_t>& padding() const { return padding_; }

 private:
  std::vector<TokenRun> runs_;
  std::vector<Tile> split_tiles_;
  std::vector<int64_t> padding_;
  std::vector<Int8Split> int8_splits_;
  std::vector<bool> taken_;  // blocks of int8_splits_

  static int64_t multiplications(const Call& call, const TokenRun& run) {
    return int64_t(run.end - run.first) * call.keys.dim * (2 * run.rows + 4);
  }

  static Tile tile_of(const Call& call, const TokenRun& run, int64_t head) {
    const int64_t floats = int64_t(run.pieces) * run.rows * partial_floats(call);
    return {run.token, head, run.rows, run.first, run.end, run.at + head * floats};
  }

  // With the last token of a block, those of all splits before it: most are there, but blocks that
  // were saved before their split was complete come back without.
  void add_int8_splits(const Call& call) {
    for (int64_t token = 0; token < call.tokens; ++token) {
      const int end = call.positions[token] + 1;
      if (call.rows[token] < 0 || end % BLOCK_KEYS || end < LONG_TEXT) continue;
      int first, stop;
      call.seen(token, &first, &stop);
      if (end > stop) continue;
      for (int split = (first + SPLIT_KEYS - 1) / SPLIT_KEYS; split < end / SPLIT_KEYS; ++split)
        if (take_blocks(call, call.rows[token], split))
          int8_splits_.push_back({call.rows[token], split});
    }
  }

  // Two sequences may share some blocks of a split: threads must not write these for both.
  bool take_blocks(const Call& call, int64_t row, int split) {
    const int32_t* from = call.tables + row * call.width + split * (SPLIT_KEYS / BLOCK_KEYS);
    const int32_t* to = from + SPLIT_KEYS / BLOCK_KEYS;
    taken_.resize(call.blocks);
    if (std::any_of(from, to, [&](int32_t b) { return b == NOT_LOCAL || taken_[b]; })) return false;
    for (; from < to; ++from) taken_[*from] = true;
    return true;
  }

  void add_runs(const Call& call, int64_t threads) {
    const int64_t share = call.tokens * call.kv_heads / (TILES_PER_THREAD * threads);
    const int64_t min_tokens =
        std::max<int64_t>(share, (MIN_TILE_ROWS + call.group - 1) / call.group);
    const int64_t max_tokens =
        std::max<int64_t>(1, std::min<int64_t>(MAX_TILE_ROWS / call.group, min_tokens));
    for (int64_t token = 0, count; token < call.tokens; token += count) {
      count = 1;
      if (call.rows[token] < 0) {
        padding_.push_back(token);
        continue;
      }
      int first, end;
      call.seen(token, &first, &end);
      for (; count < max_tokens && token + count < call.tokens; ++count) {
        if (call.rows[token + count] != call.rows[token]) break;
        int from, to;
        call.seen(token + count, &from, &to);
        if (from >= to) continue;
        first = first < end ? std::min(first, from) : from;
        end = std::max(end, to);
      }
      runs_.push_back({token, int(count * call.group), first, end, 1, 0, 0});
    }
  }
};

// Clears the result of a padding token.
inline void clear(const Call& call, int64_t token) {
  const int64_t bytes = call.heads * call.values.dim * bytes_of(call.out_dtype());
  memset(static_cast<char*>(call.out) + token * bytes, 0, bytes);
  for (int64_t head = 0; call.sums && head < call.heads; ++head) {
    float* sums = call.sums + 2 * (token * call.heads + head);
    sums[0] = -INFINITY, sums[1] = 0;
  }
}

}  // namespace
}  // namespace jinfer
