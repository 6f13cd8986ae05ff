// Attention of a flat batch over a paged cache, and the writing of new keys and values into it.
//
// Queries of one sequence and key head that stand next to each other are the rows of a tile. Only
// keys that are there are read. A tile may be cut at fixed positions and its parts computed by
// several threads: they are merged in their order either way, so that a row's bits depend neither on
// its neighbours nor on the threads.

#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_checks.h"
#include "attention_plan.h"
#include "isa.h"
#include "parallel.h"

namespace jinfer {
namespace {

struct Scratch {
  std::vector<float> memory;

  float* of(size_t floats) {
    if (memory.size() < floats + 16) memory.resize(floats + 16);
    uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((at + 63) & ~uintptr_t(63));
  }
};

thread_local Scratch scratch, partials, biases;
thread_local Plan plans;

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

void write_all(const Call& call, const Kernels& kernels, ffi::ThreadPool& pool) {
  constexpr int64_t SOME = 16, FEW = 1 << 14;  // tokens a thread; numbers for one thread
  const int64_t chunks = (call.tokens + SOME - 1) / SOME;
  const bool few = call.kv_heads * call.tokens * call.keys.dim < FEW;
  parallel(pool, chunks, few ? 1 : chunks, [&](int64_t chunk) {
    const int64_t end = std::min(call.tokens, (chunk + 1) * SOME);
    float* x = scratch.of(write_floats(call));
    for (int64_t t = chunk * SOME; t < end; ++t)
      for (int64_t head = 0; call.rows[t] >= 0 && head < call.kv_heads; ++head)
        kernels.write(call, t, head, x);
  });
}

void attend(const Call& call, const Kernels& kernels, ffi::ThreadPool& pool) {
  Plan& plan = plans;  // this thread's, also for the others
  plan.make(call, most_threads(pool));
  for (const Tile& tile : plan.cut())
    for (int64_t t = 0; call.late && t < tile.rows / call.group; ++t)
      kernels.write(call, tile.token + t, tile.head, scratch.of(write_floats(call)));
  float* partial = partials.of(plan.room);
  parallel(pool, plan.items, plan.threads, [&](int64_t item) {
    const auto [tile, part] = plan.piece(call, item);
    if (part < 0) {
      kernels.whole(call, tile, scratch.of(whole_floats(call)));
    } else {
      const int64_t before = part - tile.first_part();
      float* to = partial + tile.at + before * tile.rows * partial_floats(call);
      kernels.part(call, tile, part, to, scratch.of(part_floats(call)));
    }
  });
  constexpr int64_t FEW = 1 << 18;  // floats that one thread merges
  const int64_t merges = int64_t(plan.cut().size());
  parallel(pool, merges, plan.room < FEW ? 1 : merges, [&](int64_t i) {
    const Tile& tile = plan.cut()[i];
    kernels.merge(call, tile, partial + tile.at, scratch.of(merge_floats(call)));
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
  call.late = written && apart(call);
  if (written && !call.late) write_all(call, kernels(), pool);
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
