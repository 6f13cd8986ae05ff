// How the next token of a sequence is chosen: the stages of jinfer/sampling on one row of logits.
//
// XLA computes each stage over the whole vocabulary, for all rows, as often as a stage looks at it. Here
// a row is by itself, and a stage sees only what the ones before it left: after the first that cuts
// these are some dozens of tokens of tens of thousands.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace jinfer {

// The columns of NUMBERS and COUNTS in jinfer/sampling/sampling_metadata.py, and the STAGES of names.py.
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

// Token ids; a negative one stands for none.
struct Ids {
  const int32_t* ids;
  int64_t count;
};

// What is known of a row, as `Sampler`, `Progress` and `History` of jinfer/sampling have it.
struct Request {
  const float* numbers;
  const int32_t* counts;
  const uint32_t* key;    // two words
  const int32_t* stages;  // STAGES numbers: in the row's order, up to one that is none
  Ids ends, biased, breakers;
  const float* biases;  // of `biased`
  Ids bad_words;        // one after the other
  int64_t word;         // the length of each
  Ids history;          // the sequence so far
  int64_t prompt;       // how many of these were given
  int32_t drawn;
  float mu;
  const uint32_t* mask;  // a bit for each token that is allowed, the lowest of a word first; or null
};

struct Sampled {
  int32_t token;
  float mu;
};

struct SampleKernels {
  // The token of a row of logits, the last one where there is something that is not a number. Where
  // `left` is not null, it becomes what the stages left of them, -inf for the rest.
  Sampled (*sample)(const float* logits, int64_t vocab, const Request& request, float* filtered);
  // The log-probability of a token, and those of the `count` likeliest ones, likeliest first.
  float (*log_probabilities)(const float* logits, int64_t vocab, int32_t token, int64_t count,
                             int32_t* ids, float* top);
};

const SampleKernels& sample_portable();
const SampleKernels& sample_avx2();
const SampleKernels& sample_avx512();
inline const SampleKernels& sample_kernels() { return JINFER_DISPATCH(sample); }

inline bool is_stage(int32_t number) { return 0 <= number && number < STAGES; }

// Whether a row wants its greatest logit as it is.
inline bool is_greedy(const Request& request) {
  return !is_stage(request.stages[0]) && !request.counts[kDraws] && !request.counts[kMirostat] &&
         !request.mask;
}

}  // namespace jinfer
