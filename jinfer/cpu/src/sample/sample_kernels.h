// The kernel of sample.h, for the instructions that the including file is compiled for.
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

// Numbers that are allowed and not -inf.
void begin(Left& left, const uint32_t* mask) {
  if (mask) {
    int64_t kept = 0;
    float* const x = left.x();
    for (int64_t word = 0; word * 32 < left.vocab; ++word)
      for (uint32_t bits = mask[word]; bits; bits &= bits - 1) {
        const int64_t id = word * 32 + __builtin_ctz(bits);
        if (id >= left.vocab || !(x[id] > -INFINITY)) continue;
        x[kept] = x[id];
        left.scratch.ids[kept++] = static_cast<int32_t>(id);
      }
    left.count = kept;
    left.whole = false;
    return;
  }
  left.drop_infinite();
}

void run(Stage stage, Left& left, const Request& request) {
  const float* const n = request.numbers;
  switch (stage) {
    case kPenaltiesStage: return penalties(left, request);
    case kDryStage: return dry(left, request);
    case kTemperatureStage: return divide(left, n[kScale]);
    case kDynatempStage:
      return dynatemp(left, n[kScale], n[kDynatempRange], n[kDynatempExponent]);
    case kTopNSigmaStage: return top_n_sigma(left, n[kTopNSigma]);
    case kTopKStage: return top_k(left, request.counts[kTopK]);
    case kTfsZStage: return tfs_z(left, n[kTfsZ]);
    case kTypicalPStage: return typical_p(left, n[kTypicalP]);
    case kTopPStage: return top_p(left, n[kTopP]);
    case kMinPStage: return min_p(left, n[kMinP]);
    case kTopAStage: return top_a(left, n[kTopA]);
    case kXtcStage: return xtc(left, request);
    case kMirostatStage: return mirostat(left, request.counts[kMirostat], request.mu);
    case kFsdStage: return fsd(left, request);
    default: return;
  }
}

// The first of the greatest, with noise where the request draws.
int64_t greatest(Left& left, const Request& request) {
  constexpr float MOST_NOISE = 16;  // -log(-log(1 - 2^-23)) is 15.9,
  constexpr float LEAST_NOISE = 5;  // and with the least number 2^-126 -4.5
  const float* x = left.x();
  if (request.counts[kDraws]) {
    uint32_t key[2] = {static_cast<uint32_t>(Stream::token), static_cast<uint32_t>(request.drawn)};
    threefry(request.key, key);
    float* const scores = left.scratch.keys.data();
    // A lower bound of what wins spares most tokens their noise.
    float most = greatest_of(x, left.count) - LEAST_NOISE;
    Words place;
    for (int lane = 0; lane < LANES; ++lane) place[lane] = lane;
    vectors(x, left.count, -INFINITY, [&](int64_t i, Floats v) {
      const int64_t count = std::min<int64_t>(LANES, left.count - i);
      Floats score = all(-INFINITY);
      if (any(v >= all(most - MOST_NOISE))) {
        Words tokens = place + static_cast<uint32_t>(i);
        if (!left.whole) memcpy(&tokens, left.scratch.ids.data() + i, 4 * count);
        score = v + noise(key, tokens);
        most = std::max(most, highest(score)[0]);
      }
      memcpy(scores + i, &score, 4 * count);
    });
    x = scores;
  }
  const float most = greatest_of(x, left.count);
  int64_t at = -1;
  vectors(x, left.count, -INFINITY, [&](int64_t i, Floats v) {
    if (at >= 0 || !any(v >= all(most))) return;
    for (int lane = 0; at < 0; ++lane)
      if (v[lane] >= most) at = i + lane;
  });
  return at;
}

// Whether there is something that is not a number, or the infinite one.
bool has_odd(const float* logits, int64_t vocab) {
  Ints odd = {};
  vectors(logits, vocab, 0, [&](int64_t, Floats v) { odd |= ~(v <= all(FLT_MAX)); });
  return any(odd);
}

Choice choose(const float* logits, int64_t vocab, const Request& request, float* result) {
  Scratch& scratch = Scratch::own();
  scratch.hold(vocab);
  Left left{scratch, vocab, vocab};
  if (has_odd(logits, vocab)) {  // nothing can be said of the rest
    if (result) fill(result, vocab, NAN);
    return {static_cast<int32_t>(vocab - 1), request.mu};
  }
  memcpy(left.x(), logits, 4 * vocab);
  int i = request.stages[0] == kRulesStage;
  if (i) rules(left.x(), vocab, request);
  begin(left, request.mask);
  for (; left.count && i < STAGES && is_stage(request.stages[i]); ++i)
    run(static_cast<Stage>(request.stages[i]), left, request);

  Choice choice{0, request.mu};
  float logit = -INFINITY;
  if (left.count) {
    const int64_t at = greatest(left, request);
    choice.token = left.id(at);
    logit = left.x()[at];
  }
  if (request.counts[kMirostat]) {
    const float error = -logit / LN2 - request.numbers[kMirostatTau];
    choice.mu -= request.numbers[kMirostatEta] * error;
  }
  if (result) {
    fill(result, vocab, -INFINITY);
    for (int64_t i = 0; i < left.count; ++i) result[left.id(i)] = left.x()[i];
  }
  return choice;
}

float log_probabilities(const float* logits, int64_t vocab, int32_t token, int64_t count,
                        int32_t* ids, float* top) {
  Scratch& scratch = Scratch::own();
  scratch.hold(vocab);
  Left left{scratch, vocab, vocab};
  memcpy(left.x(), logits, 4 * vocab);
  if (has_odd(logits, vocab)) {
    for (int32_t i = 0; i < count; ++i) ids[i] = i, top[i] = NAN;
    return NAN;
  }
  log_softmax(left, left.x());
  Array<int64_t> best = likeliest(left.x(), vocab, count);
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = static_cast<int32_t>(best[i]);
    top[i] = left.x()[best[i]];
  }
  return left.x()[token];
}

const SampleKernels kSample = {choose, log_probabilities};

}  // namespace
}  // namespace jinfer
