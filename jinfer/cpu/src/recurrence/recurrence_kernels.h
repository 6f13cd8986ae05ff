// Kernels of recurrences, compiled once per instruction set. A block of columns of the state is
// copied into consecutive memory, where it stays in L1 for all tokens of a run.
#pragma once

#include "common/scratch.h"
#include "recurrence/recurrence.h"
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
      : rows_(rows), width_(width), columns_(columns), outside_(run.state + first) {
    data_ = scratch.of(rows * STATE_BLOCK);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < STATE_BLOCK; i += LANES)
        store(data_ + row * STATE_BLOCK + i,
              run.fresh ? Floats{} : load_columns(outside_ + row * width + i, columns - i));
  }
  ~StateBlock() {
    for (int64_t row = 0; row < rows_; ++row)
      memcpy(outside_ + row * width_, data_ + row * STATE_BLOCK, 4 * columns_);
  }
  StateBlock(const StateBlock&) = delete;
  StateBlock& operator=(const StateBlock&) = delete;
  float* row(int64_t i) { return data_ + i * STATE_BLOCK; }

 private:
  const int64_t rows_, width_, columns_;
  float* const outside_;
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
    Floats value[vectors], out[vectors] = {}, held[vectors] = {};
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
        for (int i = 0; i < vectors; ++i) {
          const Floats seen = by_channel ? held[i] : held[i] * decay;
          value[i] = beta * (value[i] - seen);
        }
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
    for (int i = 0; i < vectors; ++i) store_columns(to + i * LANES, out[i], columns - i * LANES);
  }
}

template <bool by_channel, Erase erase>
void matrix_scan_of(const MatrixScan& scan, const StateRun& run, int64_t head, int64_t first,
                    int64_t columns) {
  // Few columns need few registers; a column's numbers are the same.
  const auto call = columns > 2 * LANES ? matrix_scan<STATE_VECTORS, by_channel, erase>
                    : columns > LANES   ? matrix_scan<2, by_channel, erase>
                                        : matrix_scan<1, by_channel, erase>;
  call(scan, run, head, first, columns);
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
      float *above = state.row(0) + i, *below = state.row(1) + i, *most = state.row(2) + i;
      const Floats a = load(above), b = load(below), p = load(most);
      const Floats with_bonus = bonus + k, top = larger(p, with_bonus);
      const Floats old = exponential(p - top), now = exponential(with_bonus - top);
      store_columns(scan.out + at, multiply_add(old, a, now * v) / multiply_add(old, b, now), left);
      const Floats later = p + decay, next = larger(later, k);
      const Floats stays = exponential(later - next), comes = exponential(k - next);
      store(above, multiply_add(stays, a, comes * v));
      store(below, multiply_add(stays, b, comes));
      store(most, next);
    }
  }
}

void short_conv(const ShortConv& conv, const StateRun& run, int64_t first, int64_t columns) {
  const int64_t channels = conv.channels, before = conv.taps - 1;
  StateBlock state(run, before, channels, first, columns, state_scratch());
  const float* x = conv.x + run.start * channels + first;
  // Input `t` of the run, whose last ones before it are the state.
  const auto input = [&](int64_t t, int64_t i) {
    return t < 0 ? load(state.row(before + t) + i)
                 : load_columns(x + t * channels + i, columns - i);
  };
  for (int64_t t = 0; t < run.tokens; ++t) {
    for (int64_t i = 0; i < columns; i += LANES) {
      const int64_t left = columns - i;
      Floats sum = conv.bias ? load_columns(conv.bias + first + i, left) : Floats{};
      for (int64_t j = 0; j <= before; ++j)
        sum = multiply_add(load_columns(conv.weight + j * channels + first + i, left),
                           input(t - before + j, i), sum);
      store_columns(conv.out + (run.start + t) * channels + first + i, sum, left);
    }
  }
  for (int64_t m = 0; m < before; ++m)
    for (int64_t i = 0; i < columns; i += LANES)
      store(state.row(m) + i, input(run.tokens - before + m, i));
}

const RecurrenceKernels kRecurrence = {STATE_BLOCK,   matrix_scan_any, selective_scan,
                                       diagonal_scan, wkv_scan,        short_conv};

}  // namespace
}  // namespace jinfer
