// How the work of attention's call is cut into pieces that threads take.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention.h"

namespace jinfer {
namespace {

constexpr int64_t EACH = 1 << 15;      // multiplications that are worth another thread
constexpr int64_t PARTIALS = 1 << 24;  // floats of results of parts, at most

// A piece of work: a part of a tile, or the whole tile where the part is -1.
struct Item {
  int tile, part;
};

inline int64_t multiplications(const Call& call, const Tile& tile) {
  return int64_t(tile.end - tile.first) * call.keys.dim * (2 * tile.rows + 4);
}

// To be kept from call to call, for its memory: a decoding step makes one of them in each layer.
struct Plan {
  std::vector<Tile> tiles;
  std::vector<Item> items;
  std::vector<int> cut;  // tiles of which parts are items
  int64_t room;          // floats of the parts' results
  int64_t threads;       // that the items are worth

  void make(const Call& call, int64_t most_threads) {
    tiles.clear(), items.clear(), cut.clear();
    add_tiles(call);
    int64_t all = 0;
    for (const Tile& tile : tiles) all += multiplications(call, tile);
    threads = std::max<int64_t>(1, std::min(most_threads, all / EACH));
    // The longest first, so that threads end together.
    const auto longer = [&](const Tile& a, const Tile& b) {
      return multiplications(call, a) > multiplications(call, b);
    };
    if (!std::is_sorted(tiles.begin(), tiles.end(), longer))
      std::stable_sort(tiles.begin(), tiles.end(), longer);
    room = 0;
    for (int i = 0; i < int(tiles.size()); ++i) {
      Tile& tile = tiles[i];
      const int first = tile.first_part(), end = tile.end_part();
      const int64_t floats = (end - first) * tile.rows * partial_floats(call);
      if (threads < 2 || end - first < 2 || room + floats > PARTIALS ||
          multiplications(call, tile) * 4 * threads < all) {
        items.push_back({i, -1});
        continue;
      }
      tile.at = room, room += floats;
      cut.push_back(i);
      for (int part = first; part < end; ++part) items.push_back({i, part});
    }
  }

 private:
  // Tiles of tokens that stand next to each other; those of padding have none, and get zeros.
  void add_tiles(const Call& call) {
    const int group = call.group, most = std::max(1, ROWS / group);
    for (int64_t token = 0, count; token < call.tokens; token += count) {
      count = 1;
      if (call.rows[token] < 0) {
        clear(call, token);
        continue;
      }
      int first, end;
      call.seen(token, &first, &end);
      for (; count < most && token + count < call.tokens; ++count) {
        if (call.rows[token + count] != call.rows[token]) break;
        int from, to;
        call.seen(token + count, &from, &to);
        if (from >= to) continue;
        first = first < end ? std::min(first, from) : from;
        end = std::max(end, to);
      }
      for (int64_t head = 0; head < call.kv_heads; ++head)
        tiles.push_back({token, head, int(count * group), first, end, 0});
    }
  }

  static void clear(const Call& call, int64_t token) {
    const int64_t bytes = call.heads * call.values.dim * bytes_of(call.out_kind());
    memset(static_cast<char*>(call.out) + token * bytes, 0, bytes);
    for (int64_t head = 0; call.sums && head < call.heads; ++head) {
      float* sums = call.sums + 2 * (token * call.heads + head);
      sums[0] = -INFINITY, sums[1] = 0;
    }
  }
};

// Whether no token sees, or writes to, a block that another token is written to, as when each is the
// next one of another sequence: then who computes a tile may write its tokens. Of many tokens: no.
inline bool apart(const Call& call) {
  constexpr int MOST = 64, TOGETHER = 16;
  constexpr int32_t NOWHERE = INT_MIN;
  if (call.tokens > MOST) return false;
  int32_t written[MOST];
  std::fill(written, written + MOST, NOWHERE);
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.rows[t] < 0) continue;
    const int32_t block = call.block(call.rows[t], call.positions[t]);
    if (block != ELSEWHERE) written[t] = block;
  }
  auto writers = [&](int32_t block) {
    int count = 0;
    for (int64_t t = 0; t < call.tokens; t += TOGETHER)
      for (int i = 0; i < TOGETHER; ++i) count += written[t + i] == block;
    return count;
  };
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.rows[t] < 0) continue;
    if (written[t] != NOWHERE && writers(written[t]) > 1) return false;
    int first, end;
    call.seen(t, &first, &end);
    if (first >= end) continue;
    const int32_t* table = call.tables + call.rows[t] * call.width;
    for (int64_t entry = first / call.size; entry <= (end - 1) / call.size; ++entry)
      if (table[entry] != written[t] && writers(table[entry]) > 0) return false;
  }
  return true;
}

}  // namespace
}  // namespace jinfer
