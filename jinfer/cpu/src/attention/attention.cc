// Handler of `jinfer_attention`: attention of a flat batch over a paged KV cache, after new keys
// and values have been written to it.
//
// The queries of neighbouring tokens of one sequence, for one key head, are the rows of a tile.
// Only keys within a row's range are read. A tile may be split along its keys (flash-decoding) for
// several threads. Splits begin at fixed positions and are merged in order, so a row's bits depend
// neither on other rows nor on threads.

#include "attention/attention.h"

#include <algorithm>

#include "attention/attention_checks.h"
#include "attention/attention_schedule.h"
#include "common/handler.h"
#include "common/parallel.h"
#include "common/scratch.h"

namespace jinfer {
namespace {

thread_local PlanCache plans;
thread_local Scratch partials, biases;

// Biases in the layout of ScoreRules::by_distance.
const float* reversed_biases(const float* from, int64_t heads, int64_t distances) {
  const int64_t row = distances + 2 * BLOCK_KEYS;
  float* to = biases.of(heads * row);
  for (int64_t head = 0; head < heads; ++head, from += distances, to += row) {
    std::fill(to, to + BLOCK_KEYS, from[distances - 1]);
    std::reverse_copy(from, from + distances, to + BLOCK_KEYS);
    std::fill(to + BLOCK_KEYS + distances, to + row, from[0]);
  }
  return to - heads * row;
}

// Arguments: queries, rows, positions, last, tables; sinks, slopes and biases by distance, each
// possibly empty; new keys and values if they are written; the cache's arrays: vectors, or codes
// and numbers, of keys and, unless shared, of values, then int8 keys if there are any. Results: the
// output; its sums if partial; the cache's arrays if written.
ffi::Error attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     float scale, float softcap, int32_t window, int32_t ahead, int32_t lowest,
                     bool written, bool shared, int32_t bits, int32_t levels, int32_t per_code,
                     bool symmetric, int32_t dim, int32_t value_dim, bool int8_keys, bool partial) {
  const KvFormat codes{bits, levels, per_code, symmetric};
  Buffers buffers;
  Call call{};
  call.rules = {scale, softcap, window, ahead, nullptr, nullptr, nullptr, 0, lowest};
  call.written = written, call.shared = shared;
  call.keys.format = call.values.format = codes;
  call.keys.dim = dim, call.values.dim = shared ? dim : value_dim;
  if (ffi::Error error = buffers.take(args, rets); error.failure()) return error;
  if (ffi::Error error = buffers.fill(call, partial, int8_keys); error.failure()) return error;
  plans.clear();
  const auto cached = plans.of(call, pool);
  if (cached.has_error()) return cached.error();
  if (call.rules.by_distance)
    call.rules.by_distance =
        reversed_biases(call.rules.by_distance, call.heads, call.rules.distances);
  AttentionWork work(call, **cached);
  work.bind(call.q, call.k, call.v, call.out, partials.of(work.buffer()));
  run_stages(pool, {work.chunks(0), work.chunks(1), work.chunks(2)}, work.threads(),
             [&](int64_t stage, int64_t chunk) { work.run(stage, chunk); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* jinfer_attention(
    XLA_FFI_CallFrame* frame);

JINFER_HANDLER(jinfer_attention, jinfer::attention, "scale", "softcap", "window", "ahead", "lowest",
               "written", "shared", "bits", "levels", "per_code", "symmetric", "dim", "value_dim",
               "int8_keys", "partial");
