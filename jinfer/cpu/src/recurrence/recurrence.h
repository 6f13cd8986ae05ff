// Recurrences of state blocks, each over a run: consecutive tokens of one sequence. A run's tokens
// are computed one after the other, each by the same instructions, so bits depend neither on how a
// sequence is cut into runs nor on other runs. Lanes are independent columns of the state.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace jinfer {

// The change of the state S [key_dim, value_dim] by the matrix recurrence.
enum class Erase : int64_t {
  none = 0,      // S = a S + k v
  delta = 1,     // S = a S; S += k (beta (v - S k))
  low_rank = 2,  // S = a S + write (read S) + k v, with S before the token
};

// Inputs of all tokens, and sizes. The output is q S, with S after the token.
struct MatrixScan {
  int64_t heads, key_heads, key_dim, value_dim;
  const float *q, *k;         // [tokens, key_heads, key_dim]; key head h * key_heads / heads
  const float* v;             // [tokens, heads, value_dim]
  const float* log_decay;     // [tokens, heads], or [tokens, heads, key_dim] if by_channel
  const float* beta;          // [tokens, heads]: delta
  const float *read, *write;  // [tokens, heads, key_dim]: low_rank
  bool by_channel;
  Erase erase;
  float* out;  // [tokens, heads, value_dim]
};

// h = exp(dt A) h + dt x B, out = h C: h is [states, channels].
struct SelectiveScan {
  int64_t channels, states;
  const float *x, *dt;  // [tokens, channels]
  const float* a;       // [states, channels]
  const float *b, *c;   // [tokens, states]
  float* out;           // [tokens, channels]
};

// h = exp(log_decay) h + x, out = h.
struct DiagonalScan {
  int64_t channels;
  const float *log_decay, *x;  // [tokens, channels]
  float* out;
};

// RWKV-4; the state is numerator, denominator and the exponent of both, each [channels].
struct WkvScan {
  int64_t channels;
  const float *k, *v;              // [tokens, channels]
  const float *log_decay, *bonus;  // [channels]
  float* out;
};

// out[t] = sum over j < taps of weight[j] x[t - taps + 1 + j], plus bias. The state is the last
// taps - 1 inputs, oldest first.
struct ShortConv {
  int64_t channels, taps;
  const float* x;       // [tokens, channels]
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels], or null
  float* out;
};

// Tokens of one sequence, and its state, which is replaced if `kept`; `fresh`: it was zero, and its
// content is ignored.
struct StateRun {
  int64_t start, tokens;
  float* state;
  bool fresh, kept;
};

struct RecurrenceKernels {
  int64_t block;  // columns or channels that stay in caches
  // A single token is fastest with all columns.
  void (*matrix)(const MatrixScan&, const StateRun&, int64_t head, int64_t first, int64_t columns);
  void (*selective)(const SelectiveScan&, const StateRun&, int64_t first, int64_t columns);
  void (*diagonal)(const DiagonalScan&, const StateRun&, int64_t first, int64_t columns);
  void (*wkv)(const WkvScan&, const StateRun&, int64_t first, int64_t columns);
  void (*conv)(const ShortConv&, const StateRun&, int64_t first, int64_t tokens);
  // Writes the state after a run, whose tokens are all computed.
  void (*conv_state)(const ShortConv&, const StateRun&, float* state);
};

const RecurrenceKernels& recurrence_portable();
const RecurrenceKernels& recurrence_avx2();
const RecurrenceKernels& recurrence_avx512();
inline const RecurrenceKernels& recurrence_kernels() { return JINFER_DISPATCH(recurrence); }

}  // namespace jinfer
