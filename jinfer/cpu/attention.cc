// Attention of new tokens over a cache of keys and values, and the writing of the new ones.
//
// Queries of one key head stand together as rows of a tile. Only keys that are there are read. Long
// walks of few rows are cut into parts and merged; where they are cut depends on the row alone, so
// that a row's result never depends on its neighbours.

#include "attention.h"

#include <algorithm>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

namespace ffi = xla::ffi;

constexpr int PART = 512;            // keys of a part, where there is one tile only
constexpr int64_t INLINE = 1 << 18;  // multiplications that are not worth waking a thread for

struct Scratch {
  std::vector<float> memory;

  float* of(size_t floats) {
    if (memory.size() < floats + 16) memory.resize(floats + 16);
    uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((at + 63) & ~uintptr_t(63));
  }
};

thread_local Scratch scratch, partials;

const Kernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return attention_avx512();
  if (isa() == Isa::avx2) return attention_avx2();
#endif
  return attention_portable();
}

void write(const Call& call, const Kernels& kernels, ffi::ThreadPool& pool) {
  const int64_t heads = call.batch * call.kv_heads;
  const bool few = heads * call.tokens * call.keys.dim < INLINE / 16;
  parallel(pool, heads, few ? 1 : heads, [&](int64_t i) {
    int64_t b = i / call.kv_heads, start = call.positions[b * call.tokens];
    // Where it does not fit it is moved, as XLA would.
    start = std::max<int64_t>(0, std::min(start, call.length - call.tokens));
    kernels.write(call, b, i % call.kv_heads, start, scratch.of(write_floats(call)));
  });
}

void attend(const Call& call, const Kernels& kernels, ffi::ThreadPool& pool) {
  const int64_t group = call.group();
  const int64_t tokens = std::max<int64_t>(1, std::min(call.tokens, ROWS / group));
  std::vector<Tile> tiles, whole;
  int64_t rows_of_parts = 0, cost = 0;
  for (int64_t b = 0; b < call.batch; ++b)
    for (int64_t token = 0; token < call.tokens; token += tokens) {
      const int64_t count = std::min(tokens, call.tokens - token);
      int first = int(call.length), end = 0;
      for (int64_t t = token; t < token + count; ++t) {
        int from, to;
        call.seen(b, t, &from, &to);
        first = std::min(first, from), end = std::max(end, to);
      }
      const int rows = int(count * group), keys = std::max(end - first, 0);
      const int parts = tokens == call.tokens ? std::max(1, (keys + PART - 1) / PART) : 1;
      for (int64_t head = 0; head < call.kv_heads; ++head) {
        Tile tile{b, head, token, rows, first, first + keys, parts, rows_of_parts};
        cost += int64_t(keys) * call.keys.dim * (2 * rows + 4);
        if (parts == 1) {
          tiles.push_back(tile);
          continue;
        }
        whole.push_back(tile);
        for (; tile.first < first + keys; tile.first += PART) {
          tile.end = std::min(tile.first + PART, first + keys);
          tile.at = rows_of_parts;
          rows_of_parts += rows;
          tiles.push_back(tile);
        }
      }
    }
  // The last tokens see most: the longest tiles first, so that threads end together.
  std::reverse(tiles.begin(), tiles.end());
  float* partial = partials.of(rows_of_parts * partial_floats(call));
  const int64_t count = int64_t(tiles.size());
  parallel(pool, count, cost < INLINE ? 1 : count, [&](int64_t i) {
    kernels.run(call, tiles[i], partial, scratch.of(run_floats(call, tiles[i])));
  });
  for (const Tile& tile : whole) kernels.merge(call, tile, partial, scratch.of(merge_floats(call)));
}

bool kind_of(ffi::DataType type, Kind* kind) {
  switch (type) {
    case ffi::DataType::F32: *kind = Kind::f32; return true;
    case ffi::DataType::BF16: *kind = Kind::bf16; return true;
    case ffi::DataType::F16: *kind = Kind::f16; return true;
    case ffi::DataType::U32: *kind = Kind::codes; return true;
    default: return false;
  }
}

ffi::Error wrong(const char* what) {
  return ffi::Error::InvalidArgument(std::string("jinfer_attention: ") + what);
}

// Arguments: queries, positions, last, slot, sinks, slopes (the last two may be empty); keys and
// values of the new tokens where they are to be written; the cache's parts: codes and numbers, or
// the vectors, of the keys, then, unless shared, of the values. Results: attention's, then, where
// they are written, the cache's parts.
ffi::Error attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     float scale, float softcap, int32_t window, int32_t ahead, bool written,
                     bool shared, int32_t bits, int32_t levels, int32_t per_code, bool symmetric,
                     int32_t dim, int32_t value_dim) {
  const bool coded = bits > 0;
  const size_t parts = (shared ? 1 : 2) * (coded ? 2 : 1);
  const size_t given = 6 + (written ? (shared ? 1 : 2) : 0);
  if (args.size() != given + parts || rets.size() != 1 + (written ? parts : 0))
    return wrong("another number of arguments or results");
  std::vector<ffi::AnyBuffer> in;
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer) return buffer.error();
    in.push_back(*buffer);
  }
  auto out = rets.get<ffi::AnyBuffer>(0);
  if (!out) return out.error();

  Call call;
  auto shape = in[0].dimensions(), cached = in[given].dimensions();
  if (shape.size() != 4 || cached.size() != 4) return wrong("queries and cache must have 4 axes");
  if (!kind_of(in[0].element_type(), &call.kind) || call.kind == Kind::codes)
    return wrong("queries of this type");
  call.batch = shape[0], call.tokens = shape[1], call.heads = shape[2];
  call.kv_heads = cached[1], call.length = cached[2];
  if (call.heads % call.kv_heads || call.heads / call.kv_heads > ROWS)
    return wrong("query heads that key heads do not divide, or too many");
  if (call.batch > cached[0] || (written && call.tokens > call.length))
    return wrong("more rows or tokens than the cache has");
  call.q = in[0].untyped_data();
  call.positions = static_cast<const int32_t*>(in[1].untyped_data());
  call.last = static_cast<const int32_t*>(in[2].untyped_data());
  call.slot = *static_cast<const int32_t*>(in[3].untyped_data());
  call.slot = std::max<int64_t>(0, std::min<int64_t>(call.slot, cached[0] - call.batch));
  auto floats = [&](size_t i) {
    return in[i].element_count() ? static_cast<const float*>(in[i].untyped_data()) : nullptr;
  };
  call.sight = {scale, softcap, window, ahead, floats(4), floats(5)};
  call.k = written ? in[6].untyped_data() : nullptr;
  call.v = written && !shared ? in[7].untyped_data() : nullptr;
  call.out = (*out)->untyped_data();
  call.shared = shared;
  auto part = [&](size_t i) { return in[given + i].untyped_data(); };
  Codes codes{bits, levels, per_code, symmetric};
  auto kept = [&](size_t i, int of) {
    return Kept{Kind::codes, codes, of, part(i), coded ? static_cast<uint16_t*>(part(i + 1)) : 0};
  };
  call.keys = kept(0, dim);
  call.values = shared ? call.keys : kept(coded ? 2 : 1, value_dim);
  if (!kind_of(in[given].element_type(), &call.keys.kind)) return wrong("a cache of this type");
  call.values.kind = call.keys.kind;
  if (written)
    for (size_t i = 0; i < parts; ++i) {
      auto kept_in = rets.get<ffi::AnyBuffer>(1 + i);
      if (!kept_in) return kept_in.error();
      if ((*kept_in)->untyped_data() != part(i)) return wrong("a cache that is not in place");
    }
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
                                  .Attr<bool>("written")
                                  .Attr<bool>("shared")
                                  .Attr<int32_t>("bits")
                                  .Attr<int32_t>("levels")
                                  .Attr<int32_t>("per_code")
                                  .Attr<bool>("symmetric")
                                  .Attr<int32_t>("dim")
                                  .Attr<int32_t>("value_dim"));
