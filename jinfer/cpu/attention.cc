// Attention of a flat batch over a paged cache, and the writing of new keys and values into it.
//
// Queries of one sequence and key head that stand next to each other are the rows of a tile. Only
// keys that are there are read. A tile may be cut at fixed positions and its parts computed by
// several threads: they are merged in their order either way, so that a row's bits depend neither on
// its neighbours nor on the threads.

#include "attention.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention_checks.h"
#include "isa.h"
#include "parallel.h"

namespace jinfer {
namespace {

constexpr int64_t INLINE = 1 << 18;    // multiplications that are not worth waking a thread for
constexpr int64_t PARTIALS = 1 << 24;  // floats of results of parts, at most

struct Scratch {
  std::vector<float> memory;

  float* of(size_t floats) {
    if (memory.size() < floats + 16) memory.resize(floats + 16);
    uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((at + 63) & ~uintptr_t(63));
  }
};

thread_local Scratch scratch, partials, biases;

const Kernels& kernels() { return JINFER_PICK(attention); }

// As Rules::by_distance has it.
const float* turned_biases(const float* from, int64_t heads, int64_t distances) {
  const int64_t row = distances + 2 * KEYS;
  float* to = biases.of(heads * row);
  for (int64_t head = 0; head < heads; ++head, from += distances, to += row) {
    std::fill(to, to + KEYS, from[distances - 1]);
    std::reverse_copy(from, from + distances, to + KEYS);
    std::fill(to + KEYS + distances, to + row, from[0]);
  }
  return to - heads * row;
}

void write(const Call& call, const Kernels& kernels, ffi::ThreadPool& pool) {
  constexpr int64_t SOME = 16;
  const int64_t chunks = (call.tokens + SOME - 1) / SOME;
  const bool few = call.kv_heads * call.tokens * call.keys.dim < INLINE / 16;
  parallel(pool, chunks, few ? 1 : chunks, [&](int64_t chunk) {
    const int64_t end = std::min(call.tokens, (chunk + 1) * SOME);
    float* x = scratch.of(write_floats(call));
    for (int64_t t = chunk * SOME; t < end; ++t)
      if (call.rows[t] >= 0) kernels.write(call, t, x);
  });
}

// Tiles of tokens that stand next to each other; those of padding have none, and get zeros.
std::vector<Tile> tiles_of(const Call& call) {
  const int64_t group = call.group(), most = std::max<int64_t>(1, ROWS / group);
  const int64_t bytes = call.heads * call.values.dim * bytes_of(call.out_kind());
  std::vector<Tile> tiles;
  for (int64_t token = 0, count; token < call.tokens; token += count) {
    count = 1;
    if (call.rows[token] < 0) {
      memset(static_cast<char*>(call.out) + token * bytes, 0, bytes);
      for (int64_t head = 0; call.sums && head < call.heads; ++head) {
        float* sums = call.sums + 2 * (token * call.heads + head);
        sums[0] = -INFINITY, sums[1] = 0;
      }
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
  return tiles;
}

void attend(const Call& call, const Kernels& kernels, ffi::ThreadPool& pool) {
  std::vector<Tile> tiles = tiles_of(call);
  auto cost = [&](const Tile& tile) {
    return int64_t(tile.end - tile.first) * call.keys.dim * (2 * tile.rows + 4);
  };
  int64_t all = 0;
  for (const Tile& tile : tiles) all += cost(tile);
  const bool alone = all < INLINE || pool.num_threads() < 2;
  // The longest first, so that threads end together.
  std::stable_sort(tiles.begin(), tiles.end(),
                   [&](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
  struct Item {
    const Tile* tile;
    int part;  // -1: the whole tile
  };
  std::vector<Item> items;
  std::vector<const Tile*> cut;
  int64_t room = 0;
  for (Tile& tile : tiles) {
    const int first = tile.first_part(), end = tile.end_part();
    const int64_t floats = (end - first) * tile.rows * partial_floats(call);
    if (alone || end - first < 2 || room + floats > PARTIALS ||
        cost(tile) * 4 * pool.num_threads() < all) {
      items.push_back({&tile, -1});
      continue;
    }
    tile.at = room, room += floats;
    cut.push_back(&tile);
    for (int part = first; part < end; ++part) items.push_back({&tile, part});
  }
  float* partial = partials.of(room);
  const int64_t count = int64_t(items.size());
  parallel(pool, count, alone ? 1 : count, [&](int64_t i) {
    const Tile& tile = *items[i].tile;
    if (items[i].part < 0) {
      kernels.whole(call, tile, scratch.of(whole_floats(call)));
    } else {
      const int64_t before = items[i].part - tile.first_part();
      float* to = partial + tile.at + before * tile.rows * partial_floats(call);
      kernels.part(call, tile, items[i].part, to, scratch.of(part_floats(call)));
    }
  });
  const int64_t merges = int64_t(cut.size());
  parallel(pool, merges, room < INLINE ? 1 : merges, [&](int64_t i) {
    kernels.merge(call, *cut[i], partial + cut[i]->at, scratch.of(merge_floats(call)));
  });
}

// Arguments: queries, rows, positions, last, tables; sinks, slopes and biases by distance, which may
// be empty; keys and values of the new tokens where they are to be written; the cache's parts: codes
// and numbers, or the vectors, of the keys, then, unless shared, of the values. Results: attention's;
// its sums where it is partial; then, where they are written, the cache's parts.
ffi::Error attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     float scale, float softcap, int32_t window, int32_t ahead, int32_t lowest,
                     bool written, bool shared, int32_t bits, int32_t levels, int32_t per_code,
                     bool symmetric, int32_t dim, int32_t value_dim, bool partial) {
  const Codes codes{bits, levels, per_code, symmetric};
  Buffers buffers;
  Call call{};
  call.rules = {scale, softcap, window, ahead, nullptr, nullptr, nullptr, 0, lowest};
  call.shared = shared;
  call.keys.codes = call.values.codes = codes;
  call.keys.dim = dim, call.values.dim = shared ? dim : value_dim;
  if (ffi::Error error = buffers.take(args, rets); error.failure()) return error;
  if (ffi::Error error = buffers.fill(call, written, partial); error.failure()) return error;
  if (ffi::Error error = check_places(call); error.failure()) return error;
  if (call.rules.by_distance)
    call.rules.by_distance =
        turned_biases(call.rules.by_distance, call.heads, call.rules.distances);
  if (written) write(call, kernels(), pool);
  attend(call, kernels(), pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jinfer_attention(
    XLA_FFI_CallFrame* frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jinfer_attention, jinfer::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("ahead")
                                  .Attr<int32_t>("lowest")
                                  .Attr<bool>("written")
                                  .Attr<bool>("shared")
                                  .Attr<int32_t>("bits")
                                  .Attr<int32_t>("levels")
                                  .Attr<int32_t>("per_code")
                                  .Attr<bool>("symmetric")
                                  .Attr<int32_t>("dim")
                                  .Attr<int32_t>("value_dim")
                                  .Attr<bool>("partial"));
