// Handlers of recurrences with state: `jinfer_matrix_scan`, `jinfer_selective_scan`,
// `jinfer_diagonal_scan`, `jinfer_wkv_scan`, `jinfer_short_conv`. Each takes its inputs, then the
// runs (start, tokens, slot and whether fresh, each [runs]), for each token the slot that the state
// after it is copied to (-1: none), and the state table, which is changed in place: result 0 is the
// output, result 1 the table. If result 1 has no elements, the table is only read.
#include "recurrence/recurrence.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/buffer_checks.h"
#include "common/handler.h"
#include "common/parallel.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using OutF32 = ffi::ResultBuffer<ffi::F32>;

constexpr int64_t kTaskWork = 1 << 15;  // state updates that make another thread worthwhile

ffi::Error refuse(const char* what) {
  return ffi::Error::InvalidArgument(std::string("jinfer recurrence: ") + what);
}

// Copies the columns first .. first + columns - 1 of a state [rows, width].
void copy_columns(const float* from, float* to, int64_t rows, int64_t width, int64_t first,
                  int64_t columns) {
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(to + row * width + first, from + row * width + first, 4 * columns);
}

// Work units `first` .. `first + units - 1` of a run.
struct Task {
  int64_t run, first, units;
};

// The runs of a call, checked: they overlap neither in tokens nor in slots that are written, those
// of copies included.
struct Runs {
  std::vector<StateRun> all;
  bool kept;  // whether states are written
  const int32_t* copies;
  float* states;
  int64_t size;  // of a state
  const char* error = nullptr;

  Runs(const S32& starts, const S32& lengths, const S32& slots, const S32& fresh,
       const S32& copies_of, const F32& table, const OutF32& after, int64_t tokens, int64_t width,
       float* out) {
    const int64_t runs = starts.element_count();
    const auto dims = table.dimensions();
    if (dims.size() < 1 || !has_shape(starts, {runs}) || !has_shape(lengths, {runs}) ||
        !has_shape(slots, {runs}) || !has_shape(fresh, {runs}) || !has_shape(copies_of, {tokens})) {
      error = "runs do not fit each other";
      return;
    }
    kept = after->element_count() > 0;
    if (kept && (table.typed_data() != after->typed_data() ||
                 table.element_count() != after->element_count())) {
      error = "the state is not changed in place";
      return;
    }
    const int64_t count = dims[0];
    copies = copies_of.typed_data(), states = table.typed_data();
    size = count ? table.element_count() / count : 0;
    std::vector<char> slot_taken(count), token_taken(tokens);
    for (int64_t i = 0; i < runs; ++i) {
      const int64_t start = starts.typed_data()[i], length = lengths.typed_data()[i];
      const int64_t slot = slots.typed_data()[i];
      if (length == 0) continue;
      if (length < 0 || start < 0 || start + length > tokens || slot < 0 || slot >= count ||
          (kept && slot_taken[slot])) {
        error = "a run is outside the batch or the table, or two have one slot";
        return;
      }
      slot_taken[slot] = 1;
      for (int64_t t = start; t < start + length; ++t) {
        if (token_taken[t]) error = "a token is in two runs";
        token_taken[t] = 1;
      }
      all.push_back({start, length, states + slot * size, fresh.typed_data()[i] != 0, kept});
    }
    if (error) return;
    for (int64_t t = 0; t < tokens; ++t) {
      if (!token_taken[t]) std::memset(out + t * width, 0, 4 * width);  // padding
      if (!copied(t)) continue;
      if (!token_taken[t] || copies[t] >= count || slot_taken[copies[t]]) {
        error = "a copy of a run's state is outside the table, or its slot has another use";
        return;
      }
      slot_taken[copies[t]] = 1;
    }
  }

  // Whether the state after a token is copied.
  bool copied(int64_t token) const { return kept && copies[token] >= 0; }

  // Calls work(piece) for the pieces of a run that end where its state is copied, and then
  // copy(from, to) with the run's state and the copy's place.
  template <class Work, class Copy>
  void for_pieces(const StateRun& run, const Work& work, const Copy& copy) const {
    StateRun piece = run;
    for (int64_t t = run.start, end = run.start + run.tokens; t < end; ++t) {
      if (t + 1 < end && !copied(t)) continue;
      piece.tokens = t + 1 - piece.start;
      work(piece);
      if (copied(t)) copy(run.state, states + copies[t] * size);
      piece.start = t + 1, piece.fresh = false;
    }
  }

  // Calls work(run, first, units) for pieces of each run's units(run), where a unit takes size(run)
  // state updates.
  template <class Units, class Size, class Work>
  void divide(ffi::ThreadPool& pool, const Units& units, const Size& size, const Work& work) const {
    std::vector<Task> tasks;
    for (size_t run = 0; run < all.size(); ++run) {
      const int64_t count = units(all[run]);
      const int64_t each =
          std::clamp<int64_t>(kTaskWork / std::max<int64_t>(1, size(all[run])), 1, count);
      for (int64_t first = 0; first < count; first += each)
        tasks.push_back({static_cast<int64_t>(run), first, std::min(each, count - first)});
    }
    const int64_t chunks = static_cast<int64_t>(tasks.size());
    parallel_for(pool, chunks, chunks, [&](int64_t chunk) {
      const Task& task = tasks[chunk];
      work(all[task.run], task.first, task.units);
    });
  }
};

// Calls work(run, first, columns) for blocks of columns of each run, whose states are [rows, width].
// An update of a state is `cost` times as much work as an addition.
template <class Work>
void for_blocks(ffi::ThreadPool& pool, const Runs& runs, int64_t width, int64_t rows,
                int64_t cost, const Work& work) {
  const int64_t block = recurrence_kernels().block, blocks = (width + block - 1) / block;
  runs.divide(
      pool, [&](const StateRun&) { return blocks; },
      [&](const StateRun& run) { return run.tokens * rows * cost * block; },
      [&](const StateRun& run, int64_t unit, int64_t units) {
        for (int64_t end = unit + units; unit < end; ++unit) {
          const int64_t first = unit * block, columns = std::min(block, width - first);
          runs.for_pieces(
              run, [&](const StateRun& piece) { work(piece, first, columns); },
              [&](const float* from, float* to) {
                copy_columns(from, to, rows, width, first, columns);
              });
        }
      });
}

ffi::Error matrix_scan(ffi::ThreadPool pool, F32 q, F32 k, F32 v, F32 log_decay, F32 beta, F32 read,
                       F32 write, S32 starts, S32 lengths, S32 slots, S32 fresh, S32 copies,
                       F32 table, OutF32 out, OutF32 after, int64_t erase) {
  const auto keys = k.dimensions(), values = v.dimensions();
  if (keys.size() != 3 || values.size() != 3 || table.dimensions().size() != 4)
    return refuse("keys, values or the state have other axes");
  const int64_t tokens = keys[0], heads = values[1];
  MatrixScan scan{heads, keys[1], keys[2], values[2]};
  const int64_t size = scan.key_dim;
  scan.by_channel = log_decay.dimensions().size() == 3;
  if (erase < 0 || erase > 2) return refuse("no such way to erase");
  scan.erase = static_cast<Erase>(erase);
  if (!has_shape(q, {tokens, scan.key_heads, size}) || values[0] != tokens || scan.key_heads < 1 ||
      heads % scan.key_heads || size < 1 || scan.value_dim < 1 ||
      !(scan.by_channel ? has_shape(log_decay, {tokens, heads, size})
                        : has_shape(log_decay, {tokens, heads})) ||
      (scan.erase == Erase::delta && !has_shape(beta, {tokens, heads})) ||
      (scan.erase == Erase::low_rank &&
       (!has_shape(read, {tokens, heads, size}) || !has_shape(write, {tokens, heads, size}))) ||
      !has_shape(table, {table.dimensions()[0], heads, size, scan.value_dim}) ||
      !has_shape(*out, {tokens, heads, scan.value_dim}))
    return refuse("inputs do not fit each other");
  scan.q = q.typed_data(), scan.k = k.typed_data(), scan.v = v.typed_data();
  scan.log_decay = log_decay.typed_data(), scan.beta = beta.typed_data();
  scan.read = read.typed_data(), scan.write = write.typed_data();
  scan.out = out->typed_data();
  const Runs runs(starts, lengths, slots, fresh, copies, table, after, tokens,
                  heads * scan.value_dim, scan.out);
  if (runs.error) return refuse(runs.error);
  const RecurrenceKernels& kernels = recurrence_kernels();
  const auto width = [&](const StateRun& run) {
    return run.tokens == 1 ? scan.value_dim : std::min(kernels.block, scan.value_dim);
  };
  const auto blocks = [&](const StateRun& run) {
    return (scan.value_dim + width(run) - 1) / width(run);
  };
  runs.divide(
      pool, [&](const StateRun& run) { return heads * blocks(run); },
      [&](const StateRun& run) { return run.tokens * size * width(run); },
      [&](const StateRun& run, int64_t unit, int64_t units) {
        for (int64_t end = unit + units; unit < end; ++unit) {
          const int64_t head = unit / blocks(run), first = unit % blocks(run) * width(run);
          const int64_t columns = std::min(width(run), scan.value_dim - first);
          const int64_t offset = head * size * scan.value_dim;
          runs.for_pieces(
              run,
              [&](StateRun piece) {
                piece.state += offset;
                kernels.matrix(scan, piece, head, first, columns);
              },
              [&](const float* from, float* to) {
                copy_columns(from + offset, to + offset, size, scan.value_dim, first, columns);
              });
        }
      });
  return ffi::Error::Success();
}

ffi::Error selective_scan(ffi::ThreadPool pool, F32 x, F32 dt, F32 a, F32 b, F32 c, S32 starts,
                          S32 lengths, S32 slots, S32 fresh, S32 copies, F32 table, OutF32 out,
                          OutF32 after) {
  if (x.dimensions().size() != 2 || a.dimensions().size() != 2 || table.dimensions().size() != 3)
    return refuse("inputs or the state have other axes");
  const int64_t tokens = x.dimensions()[0], channels = x.dimensions()[1];
  const int64_t states = a.dimensions()[0];
  if (!has_shape(dt, {tokens, channels}) || !has_shape(a, {states, channels}) ||
      !has_shape(b, {tokens, states}) || !has_shape(c, {tokens, states}) ||
      !has_shape(table, {table.dimensions()[0], states, channels}) ||
      !has_shape(*out, {tokens, channels}))
    return refuse("inputs do not fit each other");
  const SelectiveScan scan{channels,       states,         x.typed_data(), dt.typed_data(),
                           a.typed_data(), b.typed_data(), c.typed_data(), out->typed_data()};
  const Runs runs(starts, lengths, slots, fresh, copies, table, after, tokens, channels, scan.out);
  if (runs.error) return refuse(runs.error);
  for_blocks(pool, runs, channels, states, 8,  // exponentials
             [&](const StateRun& run, int64_t first, int64_t columns) {
               recurrence_kernels().selective(scan, run, first, columns);
             });
  return ffi::Error::Success();
}

ffi::Error diagonal_scan(ffi::ThreadPool pool, F32 log_decay, F32 x, S32 starts, S32 lengths,
                         S32 slots, S32 fresh, S32 copies, F32 table, OutF32 out,
                         OutF32 after) {
  if (x.dimensions().size() != 2 || table.dimensions().size() != 2)
    return refuse("inputs or the state have other axes");
  const int64_t tokens = x.dimensions()[0], channels = x.dimensions()[1];
  if (!has_shape(log_decay, {tokens, channels}) ||
      !has_shape(table, {table.dimensions()[0], channels}) || !has_shape(*out, {tokens, channels}))
    return refuse("inputs do not fit each other");
  const DiagonalScan scan{channels, log_decay.typed_data(), x.typed_data(), out->typed_data()};
  const Runs runs(starts, lengths, slots, fresh, copies, table, after, tokens, channels, scan.out);
  if (runs.error) return refuse(runs.error);
  for_blocks(pool, runs, channels, 1, 8, [&](const StateRun& run, int64_t first, int64_t columns) {
    recurrence_kernels().diagonal(scan, run, first, columns);
  });
  return ffi::Error::Success();
}

ffi::Error wkv_scan(ffi::ThreadPool pool, F32 k, F32 v, F32 log_decay, F32 bonus, S32 starts,
                    S32 lengths, S32 slots, S32 fresh, S32 copies, F32 table, OutF32 out,
                    OutF32 after) {
  if (k.dimensions().size() != 2 || table.dimensions().size() != 3)
    return refuse("inputs or the state have other axes");
  const int64_t tokens = k.dimensions()[0], channels = k.dimensions()[1];
  if (!has_shape(v, {tokens, channels}) || !has_shape(log_decay, {channels}) ||
      !has_shape(bonus, {channels}) || !has_shape(table, {table.dimensions()[0], 3, channels}) ||
      !has_shape(*out, {tokens, channels}))
    return refuse("inputs do not fit each other");
  const WkvScan scan{channels,           k.typed_data(),   v.typed_data(), log_decay.typed_data(),
                     bonus.typed_data(), out->typed_data()};
  const Runs runs(starts, lengths, slots, fresh, copies, table, after, tokens, channels, scan.out);
  if (runs.error) return refuse(runs.error);
  for_blocks(pool, runs, channels, 3, 11, [&](const StateRun& run, int64_t first, int64_t columns) {
    recurrence_kernels().wkv(scan, run, first, columns);
  });
  return ffi::Error::Success();
}

ffi::Error short_conv(ffi::ThreadPool pool, F32 x, F32 weight, F32 bias, S32 starts, S32 lengths,
                      S32 slots, S32 fresh, S32 copies, F32 table, OutF32 out, OutF32 after) {
  if (x.dimensions().size() != 2 || weight.dimensions().size() != 2 ||
      table.dimensions().size() != 3)
    return refuse("inputs or the state have other axes");
  const int64_t tokens = x.dimensions()[0], channels = x.dimensions()[1];
  const int64_t taps = weight.dimensions()[0];
  const bool biased = bias.element_count() > 0;
  if (taps < 1 || weight.dimensions()[1] != channels || (biased && !has_shape(bias, {channels})) ||
      !has_shape(table, {table.dimensions()[0], taps - 1, channels}) ||
      !has_shape(*out, {tokens, channels}))
    return refuse("inputs do not fit each other");
  const ShortConv conv{channels,
                       taps,
                       x.typed_data(),
                       weight.typed_data(),
                       biased ? bias.typed_data() : nullptr,
                       out->typed_data()};
  const Runs runs(starts, lengths, slots, fresh, copies, table, after, tokens, channels, conv.out);
  if (runs.error) return refuse(runs.error);
  // All tokens read the state before it is replaced.
  runs.divide(
      pool, [](const StateRun& run) { return run.tokens; },
      [&](const StateRun&) { return taps * channels; },
      [&](const StateRun& run, int64_t first, int64_t count) {
        recurrence_kernels().conv(conv, run, first, count);
      });
  if (!runs.kept) return ffi::Error::Success();
  runs.divide(
      pool, [](const StateRun&) { return int64_t{1}; },
      [&](const StateRun&) { return taps * channels; },
      [&](const StateRun& run, int64_t, int64_t) {
        StateRun begun = run;
        for (begun.tokens = 1; begun.tokens <= run.tokens; ++begun.tokens)
          if (const int64_t t = run.start + begun.tokens - 1; runs.copied(t))
            recurrence_kernels().conv_state(conv, begun, runs.states + runs.copies[t] * runs.size);
        recurrence_kernels().conv_state(conv, run, run.state);
      });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_matrix_scan, jinfer::matrix_scan, "erase");
JINFER_HANDLER(jinfer_selective_scan, jinfer::selective_scan);
JINFER_HANDLER(jinfer_diagonal_scan, jinfer::diagonal_scan);
JINFER_HANDLER(jinfer_wkv_scan, jinfer::wkv_scan);
JINFER_HANDLER(jinfer_short_conv, jinfer::short_conv);
