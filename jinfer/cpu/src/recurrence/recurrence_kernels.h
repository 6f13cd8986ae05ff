// Kernels of recurrences, compiled once per instruction set. A block of columns of the state is
// copied into consecutive memory, where it stays in L1 for all tokens of a run.
#pragma once

#include <type_traits>

#include "common/scratch.h"
#include "recurrence/recurrence.h"
#include "simd/elementary.h"
#include "simd/simd.h"

namespace jinfer {
namespace {

constexpr int STATE_VECTORS = 4;  // of a block of columns
constexpr int64_t STATE_BLOCK = STATE_VECTORS * LANES;

inline Floats load_columns(const float* from, int64_t count) {
  return count >= LANES ? load(from) : count > 0 ? load_partial(from, count) : Floats{};
}

inline void store_columns(float* to, Floats x, int64_t count) {
  if (count > 0) memcpy(to, &x, 4 * (count < LANES ? count : LANES));
}

// The columns first .. first + columns - 1 of a state [rows, width], as [rows, STATE_BLOCK].
class StateBlock {
 public:
  StateBlock(const StateRun& run, int64_t rows, int64_t width, int64_t first, int64_t columns,
             Scratch& scratch)
      : rows_(rows),
        width_(width),
        columns_(columns),
        outside_(run.state + first),
        kept_(run.kept) {
    data_ = scratch.of(rows * STATE_BLOCK);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < STATE_BLOCK; i += LANES)
        store(data_ + row * STATE_BLOCK + i,
              run.fresh ? Floats{} : load_columns(outside_ + row * width + i, columns - i));
  }
  ~StateBlock() {
    if (!kept_) return;
    for (int64_t row = 0; row < rows_; ++row)
      memcpy(outside_ + row * width_, data_ + row * STATE_BLOCK, 4 * columns_);
  }
  StateBlock(const StateBlock&) = delete;
  StateBlock& operator=(const StateBlock&) = delete;
  float* row(int64_t i) { return data_ + i * STATE_BLOCK; }

 private:
  const int64_t rows_, width_, columns_;
  float* const outside_;
  const bool kept_;
  float* data_;
};

inline Scratch& state_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

inline Scratch& decay_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// e^x for each of `count` numbers.
inline void exponentials(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += LANES)
    store_columns(y + i, exponential(load_columns(x + i, count - i)), count - i);
}

template <int vectors, bool by_channel, Erase erase>
void matrix_scan(const MatrixScan& scan, const StateRun& run, int64_t head, int64_t first,
                 int64_t columns) {
  const int64_t size = scan.key_dim, key_head = head * scan.key_heads / scan.heads;
  StateBlock state(run, size, scan.value_dim, first, columns, state_scratch());
  float* decays = by_channel ? decay_scratch().of(size) : nullptr;
  for (int64_t t = run.start; t < run.start + run.tokens; ++t) {
    const int64_t at = t * scan.heads + head, key_at = (t * scan.key_heads + key_head) * size;
    const float *q = scan.q + key_at, *k = scan.k + key_at;
    const float* v = scan.v + at * scan.value_dim + first;
    Floats decay = {};
    if (by_channel)
      exponentials(scan.log_decay + at * size, size, decays);
    else
      decay = exponential(broadcast(scan.log_decay[at]));
    // Loops over them are unrolled, or the sums would be in memory.
    Floats value[vectors], out[vectors] = {}, held[vectors] = {};
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) value[i] = load_columns(v + i * LANES, columns - i * LANES);
    if (erase != Erase::none) {
      const float* read = erase == Erase::delta ? k : scan.read + at * size;
      for (int64_t row = 0; row < size; ++row) {
        const float* s = state.row(row);
        Floats weight = broadcast(read[row]);
        if (by_channel && erase == Erase::delta) weight = weight * broadcast(decays[row]);
#pragma GCC unroll 4
        for (int i = 0; i < vectors; ++i)
          held[i] = multiply_add(weight, load(s + i * LANES), held[i]);
      }
      if (erase == Erase::delta) {
        const Floats beta = broadcast(scan.beta[at]);
#pragma GCC unroll 4
        for (int i = 0; i < vectors; ++i)
          value[i] = beta * multiply_add(-held[i], by_channel ? broadcast(1.0f) : decay, value[i]);
      }
    }
    const float* write = erase == Erase::low_rank ? scan.write + at * size : nullptr;
    for (int64_t row = 0; row < size; ++row) {
      float* s = state.row(row);
      const Floats key = broadcast(k[row]), query = broadcast(q[row]);
      if (by_channel) decay = broadcast(decays[row]);
      Floats erased = {};
      if (erase == Erase::low_rank) erased = broadcast(write[row]);
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) {
        Floats x = multiply_add(key, value[i], decay * load(s + i * LANES));
        if (erase == Erase::low_rank) x = multiply_add(erased, held[i], x);
        store(s + i * LANES, x);
        out[i] = multiply_add(query, x, out[i]);
      }
    }
    float* to = scan.out + at * scan.value_dim + first;
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) store_columns(to + i * LANES, out[i], columns - i * LANES);
  }
}

// Rows of a single token's state, all columns: adds their value under `read` to `held`.
template <int rows, bool by_channel, Erase erase>
inline void read_rows(const float* state, const float* read, const float* decays, int64_t width,
                      float* held) {
  Floats weight[rows];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
    weight[r] = broadcast(read[r]);
    if (by_channel && erase == Erase::delta) weight[r] = weight[r] * broadcast(decays[r]);
  }
  for (int64_t i = 0; i < width; i += LANES) {
    Floats sum = load(held + i);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) sum = multiply_add(weight[r], load(state + r * width + i), sum);
    store(held + i, sum);
  }
}

// Replaces rows of a single token's state, and adds their contribution to `out`.
template <int rows, Erase erase>
inline void update_rows(float* state, const float* k, const float* q, const float* write,
                        const Floats* decay, int64_t width, const float* value, const float* held,
                        float* out) {
  Floats key[rows], query[rows];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) key[r] = broadcast(k[r]), query[r] = broadcast(q[r]);
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats v = load(value + i);
    Floats sum = load(out + i);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      float* s = state + r * width + i;
      Floats x = multiply_add(key[r], v, decay[r] * load(s));
      if (erase == Erase::low_rank) x = multiply_add(broadcast(write[r]), load(held + i), x);
      store(s, x);
      sum = multiply_add(query[r], x, sum);
    }
    store(out + i, sum);
  }
}

// A single token, whose state comes from memory and is kept: all columns of four rows at a time, in the order
// in which they are stored. Each column's numbers are those of matrix_scan. `value_dim` is a
// multiple of LANES.
template <bool by_channel, Erase erase>
void matrix_step(const MatrixScan& scan, const StateRun& run, int64_t head) {
  const int64_t size = scan.key_dim, width = scan.value_dim;
  const int64_t at = run.start * scan.heads + head;
  const int64_t key_at = (run.start * scan.key_heads + head * scan.key_heads / scan.heads) * size;
  const float *q = scan.q + key_at, *k = scan.k + key_at;
  float* value = state_scratch().of(3 * width);
  float *held = value + width, *out = held + width;
  float* decays = by_channel ? decay_scratch().of(size) : nullptr;
  const Floats decay = by_channel ? broadcast(1.0f) : exponential(broadcast(scan.log_decay[at]));
  if (by_channel) exponentials(scan.log_decay + at * size, size, decays);
  memcpy(value, scan.v + at * width, 4 * width);
  memset(held, 0, 8 * width);
  if (run.fresh) memset(run.state, 0, 4 * size * width);
  if (erase != Erase::none) {
    const float* read = erase == Erase::delta ? k : scan.read + at * size;
    int64_t row = 0;
    for (; row + 4 <= size; row += 4)
      read_rows<4, by_channel, erase>(run.state + row * width, read + row, decays + row, width,
                                      held);
    for (; row < size; ++row)
      read_rows<1, by_channel, erase>(run.state + row * width, read + row, decays + row, width,
                                      held);
  }
  if (erase == Erase::delta) {
    const Floats beta = broadcast(scan.beta[at]);
    for (int64_t i = 0; i < width; i += LANES)
      store(value + i, beta * multiply_add(-load(held + i), decay, load(value + i)));
  }
  const float* write = erase == Erase::low_rank ? scan.write + at * size : k;
  const auto update = [&](auto rows, int64_t row) {
    Floats factors[rows];
    for (int r = 0; r < rows; ++r) factors[r] = by_channel ? broadcast(decays[row + r]) : decay;
    update_rows<rows, erase>(run.state + row * width, k + row, q + row, write + row, factors, width,
                             value, held, out);
  };
  int64_t row = 0;
  for (; row + 4 <= size; row += 4) update(std::integral_constant<int, 4>{}, row);
  for (; row < size; ++row) update(std::integral_constant<int, 1>{}, row);
  memcpy(scan.out + at * width, out, 4 * width);
}

template <bool by_channel, Erase erase>
void matrix_scan_of(const MatrixScan& scan, const StateRun& run, int64_t head, int64_t first,
                    int64_t columns) {
  if (run.tokens == 1 && run.kept && columns == scan.value_dim && columns % LANES == 0)
    return matrix_step<by_channel, erase>(scan, run, head);
  // Few columns need few registers; a column's numbers are the same.
  for (int64_t end = first + columns; first < end; first += STATE_BLOCK) {
    const int64_t block = end - first < STATE_BLOCK ? end - first : STATE_BLOCK;
    const auto call = block > 2 * LANES ? matrix_scan<STATE_VECTORS, by_channel, erase>
                      : block > LANES   ? matrix_scan<2, by_channel, erase>
                                        : matrix_scan<1, by_channel, erase>;
    call(scan, run, head, first, block);
  }
}

void matrix_scan_any(const MatrixScan& scan, const StateRun& run, int64_t head, int64_t first,
                     int64_t columns) {
  const auto call = [&] {
    switch (scan.erase) {
      case Erase::none:
        return scan.by_channel ? matrix_scan_of<true, Erase::none>
                               : matrix_scan_of<false, Erase::none>;
      case Erase::delta:
        return scan.by_channel ? matrix_scan_of<true, Erase::delta>
                               : matrix_scan_of<false, Erase::delta>;
      default:
        return scan.by_channel ? matrix_scan_of<true, Erase::low_rank>
                               : matrix_scan_of<false, Erase::low_rank>;
    }
  }();
  call(scan, run, head, first, columns);
}

void selective_scan(const SelectiveScan& scan, const StateRun& run, int64_t first,
                    int64_t columns) {
  const int64_t channels = scan.channels, states = scan.states;
  StateBlock state(run, states, channels, first, columns, state_scratch());
  for (int64_t t = run.start; t < run.start + run.tokens; ++t) {
    const float *b = scan.b + t * states, *c = scan.c + t * states;
    for (int64_t i = 0; i < columns; i += LANES) {
      const int64_t left = columns - i, at = t * channels + first + i;
      const Floats dt = load_columns(scan.dt + at, left);
      const Floats x = dt * load_columns(scan.x + at, left);
      Floats out = {};
      for (int64_t n = 0; n < states; ++n) {
        float* s = state.row(n) + i;
        const Floats a = load_columns(scan.a + n * channels + first + i, left);
        const Floats h = multiply_add(x, broadcast(b[n]), exponential(dt * a) * load(s));
        store(s, h);
        out = multiply_add(h, broadcast(c[n]), out);
      }
      store_columns(scan.out + at, out, left);
    }
  }
}

void diagonal_scan(const DiagonalScan& scan, const StateRun& run, int64_t first, int64_t columns) {
  StateBlock state(run, 1, scan.channels, first, columns, state_scratch());
  for (int64_t t = run.start; t < run.start + run.tokens; ++t) {
    for (int64_t i = 0; i < columns; i += LANES) {
      const int64_t left = columns - i, at = t * scan.channels + first + i;
      float* s = state.row(0) + i;
      const Floats decay = exponential(load_columns(scan.log_decay + at, left));
      const Floats h = multiply_add(decay, load(s), load_columns(scan.x + at, left));
      store(s, h);
      store_columns(scan.out + at, h, left);
    }
  }
}

void wkv_scan(const WkvScan& scan, const StateRun& run, int64_t first, int64_t columns) {
  StateBlock state(run, 3, scan.channels, first, columns, state_scratch());
  if (run.fresh)  // an empty sum's exponent, so that the first token's is the larger
    for (int64_t i = 0; i < columns; i += LANES) store(state.row(2) + i, broadcast(-1e30f));
  for (int64_t t = run.start; t < run.start + run.tokens; ++t) {
    for (int64_t i = 0; i < columns; i += LANES) {
      const int64_t left = columns - i, at = t * scan.channels + first + i;
      const Floats k = load_columns(scan.k + at, left), v = load_columns(scan.v + at, left);
      const Floats bonus = load_columns(scan.bonus + first + i, left);
      const Floats decay = load_columns(scan.log_decay + first + i, left);
      float *above = state.row(0) + i, *below = state.row(1) + i, *max_value = state.row(2) + i;
      const Floats a = load(above), b = load(below), p = load(max_value);
      const Floats with_bonus = bonus + k, top = larger(p, with_bonus);
      const Floats old = exponential(p - top), now = exponential(with_bonus - top);
      store_columns(scan.out + at, multiply_add(old, a, now * v) / multiply_add(old, b, now), left);
      const Floats later = p + decay, next = larger(later, k);
      const Floats stays = exponential(later - next), comes = exponential(k - next);
      store(above, multiply_add(stays, a, comes * v));
      store(below, multiply_add(stays, b, comes));
      store(max_value, next);
    }
  }
}

// Calls f(at, left) for vectors of `count` columns, of which `left` are there.
template <class F>
inline void for_columns(int64_t count, F f) {
  for (int64_t i = 0; i < count; i += LANES) f(i, count - i);
}

// A row of the inputs before and in a run: number `at` of the run, whose state has those before it.
inline const float* conv_input(const ShortConv& conv, const StateRun& run, int64_t at) {
  return at < 0 ? run.state + (conv.taps - 1 + at) * conv.channels
                : conv.x + (run.start + at) * conv.channels;
}

void short_conv(const ShortConv& conv, const StateRun& run, int64_t first, int64_t tokens) {
  const int64_t channels = conv.channels, before = conv.taps - 1;
  for (int64_t t = first; t < first + tokens; ++t) {
    // There are zeros before a sequence.
    const int64_t from = run.fresh && t < before ? before - t : 0;
    float* out = conv.out + (run.start + t) * channels;
    for_columns(channels, [&](int64_t i, int64_t left) {
      Floats sum = conv.bias ? load_columns(conv.bias + i, left) : Floats{};
      for (int64_t j = from; j <= before; ++j)
        sum = multiply_add(load_columns(conv.weight + j * channels + i, left),
                           load_columns(conv_input(conv, run, t - before + j) + i, left), sum);
      store_columns(out + i, sum, left);
    });
  }
}

void conv_state(const ShortConv& conv, const StateRun& run, float* state) {
  const int64_t channels = conv.channels, before = conv.taps - 1;
  for (int64_t m = 0; m < before; ++m) {
    const int64_t at = run.tokens - before + m;
    float* to = state + m * channels;
    if (at < 0 && run.fresh)
      memset(to, 0, 4 * channels);
    else
      memcpy(to, conv_input(conv, run, at), 4 * channels);
  }
}

const RecurrenceKernels kRecurrence = {STATE_BLOCK, matrix_scan_any, selective_scan, diagonal_scan,
                                       wkv_scan,    short_conv,      conv_state};

}  // namespace
}  // namespace jinfer
