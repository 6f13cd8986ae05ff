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

// Three stages: new keys and values are written, unless who computes a tile does it; tiles or parts
// of them are computed; parts are merged. One job, so that threads that help need not be found anew.
void attend(const Call& call, const AttentionKernels& kernels, ffi::ThreadPool& pool) {
  constexpr int64_t SOME = 8;  // tokens that one thread writes
  Plan& plan = plans;          // this thread's, also for the others
  plan.make(call, most_threads(pool));
  const auto write = [&](int64_t token, int64_t head) {
    if (call.rows[token] >= 0) kernels.write(call, token, head, scratch.of(write_floats(call)));
  };
  for (const Tile& tile : plan.cut())
    for (int64_t t = 0; call.late && t < tile.rows / call.group; ++t)
      write(tile.token + t, tile.head);
  float* partial = partials.of(plan.room);
  const int64_t writes = call.k && !call.late ? (call.tokens + SOME - 1) / SOME : 0;
  const int64_t merges = plan.cut().size();
  in_stages(pool, {writes, plan.items, merges}, plan.threads, [&](int64_t stage, int64_t i) {
    if (stage == 0) {
      for (int64_t t = i * SOME; t < std::min(call.tokens, (i + 1) * SOME); ++t)
        for (int64_t head = 0; head < call.kv_heads; ++head) write(t, head);
    } else if (stage == 2) {
      const Tile& tile = plan.cut()[i];
      kernels.merge(call, tile, partial + tile.at, scratch.of(merge_floats(call)));
    } else if (const auto [tile, part] = plan.piece(call, i); part < 0) {
      kernels.whole(call, tile, scratch.of(whole_floats(call)));
    } else {
      const int64_t before = part - tile.first_part();
      float* to = partial + tile.at + before * tile.rows * partial_floats(call);
      kernels.part(call, tile, part, to, scratch.of(part_floats(call)));
    }
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
  attend(call, attention_kernels(), pool);
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
