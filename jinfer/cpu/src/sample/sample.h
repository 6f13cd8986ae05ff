// Sampling: the stages of jinfer/sampling on one row of logits.
//
// XLA computes each stage over the whole vocabulary of all rows, as often as the stage reads it.
// Here a stage sees only the candidates that earlier stages left, mostly some dozens.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace jinfer {

// Columns of NUMBERS and COUNTS in jinfer/sampling/sampling_metadata.py, and STAGES of
// jinfer/sampling/param_names.py.
enum Number : int {
  kScale,
  kDynatempRange,
  kDynatempExponent,
  kTopP,
  kMinP,
  kTypicalP,
  kTfsZ,
  kTopA,
  kTopNSigma,
  kXtcProbability,
  kXtcThreshold,
  kMirostatTau,
  kMirostatEta,
  kRepetitionPenalty,
  kPresencePenalty,
  kFrequencyPenalty,
  kDryMultiplier,
  kDryBase,
  kFsdAlpha,
  kFsdBeta,
  kRandomFsdProbability,
  NUMBERS
};
enum Count : int {
  kDraws,
  kIgnoreEos,
  kMinTokens,
  kTopK,
  kMirostat,
  kPenaltyLastN,
  kDryAllowedLength,
  kDryPenaltyLastN,
  kFsdK,
  kFsdN,
  kFsdPool,
  kRandomFsdTokens,
  COUNTS
};
enum Stage : int {
  kRulesStage,
  kPenaltiesStage,
  kDryStage,
  kTemperatureStage,
  kDynatempStage,
  kTopNSigmaStage,
  kTopKStage,
  kTfsZStage,
  kTypicalPStage,
  kTopPStage,
  kMinPStage,
  kTopAStage,
  kXtcStage,
  kMirostatStage,
  kFsdStage,
  STAGES
};

// Token ids; negative: none.
struct Ids {
  const int32_t* ids;
  int64_t count;
};

// State of a row, as `Sampler`, `Progress` and `History` of jinfer/sampling.
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
