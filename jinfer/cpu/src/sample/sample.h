// Sampling: the stages of jinfer/sampling on one row of logits.
//
// XLA computes each stage over the whole vocabulary of all rows, as often as the stage reads it.
// Here a stage sees only the candidates that earlier stages left, mostly some dozens.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace jinfer {

// Columns of a request that the stages read, and the stages, by their names in jinfer/sampling.
// Python reads these names (`jinfer_sampler_layout`) and passes the columns in their order; XLA's
// operations compute other stages.
#define JINFER_SAMPLER_NUMBERS(X)                   \
  X(Temperature, "temperature")                     \
  X(DynatempRange, "dynatemp_range")                \
  X(DynatempExponent, "dynatemp_exponent")          \
  X(TopP, "top_p")                                  \
  X(MinP, "min_p")                                  \
  X(TypicalP, "typical_p")                          \
  X(TfsZ, "tfs_z")                                  \
  X(TopA, "top_a")                                  \
  X(TopNSigma, "top_n_sigma")                       \
  X(XtcProbability, "xtc_probability")              \
  X(XtcThreshold, "xtc_threshold")                  \
  X(MirostatTau, "mirostat_tau")                    \
  X(MirostatEta, "mirostat_eta")                    \
  X(RepetitionPenalty, "repetition_penalty")        \
  X(PresencePenalty, "presence_penalty")            \
  X(FrequencyPenalty, "frequency_penalty")          \
  X(DryMultiplier, "dry_multiplier")                \
  X(DryBase, "dry_base")                            \
  X(FsdAlpha, "fsd_alpha")                          \
  X(FsdBeta, "fsd_beta")                            \
  X(RandomFsdProbability, "random_fsd_probability")
#define JINFER_SAMPLER_COUNTS(X)            \
  X(Draws, "draws")                         \
  X(TopK, "top_k")                          \
  X(Mirostat, "mirostat")                   \
  X(PenaltyLastN, "penalty_last_n")         \
  X(DryAllowedLength, "dry_allowed_length") \
  X(DryPenaltyLastN, "dry_penalty_last_n")  \
  X(FsdK, "fsd_k")                          \
  X(FsdN, "fsd_n")                          \
  X(FsdPool, "fsd_pool")                    \
  X(RandomFsdTokens, "random_fsd_tokens")   \
  X(MinTokens, "min_tokens")                \
  X(IgnoreEos, "ignore_eos")
#define JINFER_SAMPLER_STAGES(X) \
  X(Rules, "rules")              \
  X(Penalties, "penalties")      \
  X(Dry, "dry")                  \
  X(Temperature, "temperature")  \
  X(Dynatemp, "dynatemp")        \
  X(TopNSigma, "top_n_sigma")    \
  X(TopK, "top_k")               \
  X(TfsZ, "tfs_z")               \
  X(TypicalP, "typical_p")       \
  X(TopP, "top_p")               \
  X(MinP, "min_p")               \
  X(TopA, "top_a")               \
  X(Xtc, "xtc")                  \
  X(Mirostat, "mirostat")        \
  X(Fsd, "fsd")

#define JINFER_COLUMN(name, text) k##name,
#define JINFER_STAGE(name, text) k##name##Stage,
enum Number : int { JINFER_SAMPLER_NUMBERS(JINFER_COLUMN) NUMBERS };
enum Count : int { JINFER_SAMPLER_COUNTS(JINFER_COLUMN) COUNTS };
enum Stage : int { JINFER_SAMPLER_STAGES(JINFER_STAGE) STAGES };
#undef JINFER_COLUMN
#undef JINFER_STAGE

// Token ids; negative: none.
struct Ids {
  const int32_t* ids;
  int64_t count;
};

// State of a row, as `SamplingMetadata`, `SamplerState` and `History` of jinfer/sampling.
struct Request {
  const float* numbers;
  const int32_t* counts;
  const uint32_t* key;    // two words
  const int32_t* stages;  // up to STAGES numbers in the row's order, then an invalid one
  Ids ends, biased, breakers;
  const float* biases;  // of `biased`
  Ids bad_words;        // one after the other
  int64_t word;         // length of each
  Ids history;          // the sequence so far
  int64_t prompt;       // length of the prompt
  int32_t drawn;
  float mu;
  const uint32_t* mask;  // bitmask of allowed tokens, lowest bit first; or null
};

constexpr int32_t NOT_FINITE = -2;  // instead of a token: there is a NaN or +inf

struct Sampled {
  int32_t token;
  float mu;
};

struct SampleKernels {
  // The next token; the last one if a logit is NaN. `filtered`, if not null, receives the logits
  // that the stages leave, -inf for others.
  Sampled (*sample)(const float* logits, int64_t vocab, const Request& request, float* filtered);
  // Log-probability of a token, and of the `count` most likely ones, in descending order.
  float (*log_probabilities)(const float* logits, int64_t vocab, int32_t token, int64_t count,
                             int32_t* ids, float* top);
};

const SampleKernels& sample_portable();
const SampleKernels& sample_avx2();
const SampleKernels& sample_avx512();
inline const SampleKernels& sample_kernels() { return JINFER_DISPATCH(sample); }

inline bool is_stage(int32_t number) { return 0 <= number && number < STAGES; }

// Whether a row's token is the argmax of its logits.
inline bool is_greedy(const Request& request) {
  return !is_stage(request.stages[0]) && !request.counts[kDraws] && !request.counts[kMirostat] &&
         !request.mask;
}

}  // namespace jinfer
