// Sampling of one row, compiled once per instruction set.
#pragma once

#include "sample/candidates.h"
#include "sample/sample.h"
#include "sample/sample_penalties.h"
#include "sample/sample_rng.h"
#include "sample/sample_truncation.h"

namespace jinfer {
namespace {

void fill(float* to, int64_t count, float with) {
  for (int64_t i = 0; i < count; ++i) to[i] = with;
}

// Keeps candidates that are allowed and not -inf.
void apply_mask(Candidates& candidates, const uint32_t* mask) {
  if (mask) {
    int64_t kept = 0;
    float* const x = candidates.x();
    for (int64_t word = 0; word * 32 < candidates.vocab; ++word)
      for (uint32_t bits = mask[word]; bits; bits &= bits - 1) {
        const int64_t id = word * 32 + __builtin_ctz(bits);
        if (id >= candidates.vocab || !(x[id] > -INFINITY)) continue;
        x[kept] = x[id];
        candidates.scratch.ids[kept++] = static_cast<int32_t>(id);
      }
    candidates.count = kept;
    candidates.whole = false;
    return;
  }
  candidates.drop_infinite();
}

void run_stage(Stage stage, Candidates& candidates, const Request& request) {
  const float* const n = request.numbers;
  switch (stage) {
    case kPenaltiesStage: return penalties(candidates, request);
    case kDryStage: return dry(candidates, request);
    case kTemperatureStage: return divide(candidates, n[kTemperature]);
    case kDynatempStage:
      return dynatemp(candidates, n[kTemperature], n[kDynatempRange], n[kDynatempExponent]);
    case kTopNSigmaStage: return top_n_sigma(candidates, n[kTopNSigma]);
    case kTopKStage: return top_k(candidates, request.counts[kTopK]);
    case kTfsZStage: return tfs_z(candidates, n[kTfsZ]);
    case kTypicalPStage: return typical_p(candidates, n[kTypicalP]);
    case kTopPStage: return top_p(candidates, n[kTopP]);
    case kMinPStage: return min_p(candidates, n[kMinP]);
    case kTopAStage: return top_a(candidates, n[kTopA]);
    case kXtcStage: return xtc(candidates, request);
    case kMirostatStage: return mirostat(candidates, request.counts[kMirostat], request.mu);
    case kFsdStage: return fsd(candidates, request);
    default: return;
  }
}

// First index of the maximum, with Gumbel noise if the request samples.
int64_t argmax_with_noise(Candidates& candidates, const Request& request) {
  constexpr float MOST_NOISE = 16;  // -log(-log(1 - 2^-23)) = 15.9
  constexpr float LEAST_NOISE = 5;  // -log(-log(2^-126)) = -4.5
  const float* x = candidates.x();
  if (request.counts[kDraws]) {
    uint32_t key[2] = {static_cast<uint32_t>(RandomStream::token),
                       static_cast<uint32_t>(request.drawn)};
    threefry(request.key, key);
    float* const scores = candidates.scratch.keys.data();
    // A lower bound of the winner spares most tokens their noise.
    float max_value = max_of(x, candidates.count) - LEAST_NOISE;
    Words place;
    for (int lane = 0; lane < LANES; ++lane) place[lane] = lane;
    for_vectors(x, candidates.count, -INFINITY, [&](int64_t i, Floats v) {
      const int64_t count = std::min<int64_t>(LANES, candidates.count - i);
      Floats score = broadcast(-INFINITY);
      if (any(v >= broadcast(max_value - MOST_NOISE))) {
        Words tokens = place + static_cast<uint32_t>(i);
        if (!candidates.whole) memcpy(&tokens, candidates.scratch.ids.data() + i, 4 * count);
        score = v + noise(key, tokens);
        max_value = std::max(max_value, max_lane(score)[0]);
      }
      memcpy(scores + i, &score, 4 * count);
    });
    x = scores;
  }
  const float max_value = max_of(x, candidates.count);
  int64_t at = -1;
  for_vectors(x, candidates.count, -INFINITY, [&](int64_t i, Floats v) {
    if (at >= 0 || !any(v >= broadcast(max_value))) return;
    for (int lane = 0; at < 0; ++lane)
      if (v[lane] >= max_value) at = i + lane;
  });
  return at;
}

// Whether there is a NaN or +inf.
bool has_nan_or_inf(const float* logits, int64_t vocab) {
  Ints odd = {};
  for_vectors(logits, vocab, 0, [&](int64_t, Floats v) { odd |= ~(v <= broadcast(FLT_MAX)); });
  return any(odd);
}

Sampled sample(const float* logits, int64_t vocab, const Request& request, float* result) {
  Scratch& scratch = Scratch::local();
  scratch.reserve(vocab);
  Candidates candidates{scratch, vocab, vocab};
  if (has_nan_or_inf(logits, vocab)) {  // the rest is meaningless
    if (result) fill(result, vocab, NAN);
    return {NOT_FINITE, request.mu};
  }
  memcpy(candidates.x(), logits, 4 * vocab);
  int i = request.stages[0] == kRulesStage;
  if (i) rules(candidates.x(), vocab, request);
  apply_mask(candidates, request.mask);
  for (; candidates.count && i < STAGES && is_stage(request.stages[i]); ++i)
    run_stage(static_cast<Stage>(request.stages[i]), candidates, request);

  Sampled sampled{0, request.mu};
  float logit = -INFINITY;
  if (candidates.count) {
    const int64_t at = argmax_with_noise(candidates, request);
    sampled.token = candidates.id(at);
    logit = candidates.x()[at];
  }
  if (request.counts[kMirostat]) {
    const float error = -logit / LN2 - request.numbers[kMirostatTau];
    sampled.mu -= request.numbers[kMirostatEta] * error;
  }
  if (result) {
    fill(result, vocab, -INFINITY);
    for (int64_t i = 0; i < candidates.count; ++i) result[candidates.id(i)] = candidates.x()[i];
  }
  return sampled;
}

float log_probabilities(const float* logits, int64_t vocab, int32_t token, int64_t count,
                        int32_t* ids, float* top) {
  Scratch& scratch = Scratch::local();
  scratch.reserve(vocab);
  Candidates candidates{scratch, vocab, vocab};
  memcpy(candidates.x(), logits, 4 * vocab);
  if (has_nan_or_inf(logits, vocab)) {
    for (int32_t i = 0; i < count; ++i) ids[i] = i, top[i] = NAN;
    return NAN;
  }
  log_softmax(candidates, candidates.x());
  Array<int64_t> best = top_indices(candidates.x(), vocab, count);
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = static_cast<int32_t>(best[i]);
    top[i] = candidates.x()[best[i]];
  }
  return candidates.x()[token];
}

const SampleKernels kSample = {sample, log_probabilities};

}  // namespace
}  // namespace jinfer
