// Penalties, DRY and FSD: stages that read the sequence (jinfer/sampling/{penalties,fsd}.py).
#pragma once

#include "sample/candidates.h"
#include "sample/sample.h"
#include "sample/sample_rng.h"
#include "sample/sample_truncation.h"

namespace jinfer {
namespace {

constexpr int64_t MAX_MATCH = 128;                     // as in penalties.py
constexpr int64_t MAX_CANDIDATES = 64, MAX_NGRAM = 8;  // as in param_ranges.py

// Per-token marks, cleared at the end of a stage.
class TokenMarks {
 public:
  TokenMarks(Candidates& candidates) : marks_(candidates.scratch.marks), vocab_(candidates.vocab) {}
  ~TokenMarks() {
    for (const int32_t id : used_) marks_[id] = 0;
  }

  bool known(int32_t id) const { return 0 <= id && id < vocab_; }
  int32_t operator[](int32_t id) const { return marks_[id]; }
  void put(int32_t id, int32_t mark) {
    if (!known(id) || !mark) return;
    if (!marks_[id]) used_.push_back(id);
    marks_[id] = mark;
  }
  void raise(int32_t id, int32_t mark) {
    if (known(id) && mark > marks_[id]) put(id, mark);
  }

 private:
  Array<int32_t>& marks_;
  const int64_t vocab_;
  Array<int32_t> used_;
};

// The token `places` before the end, 1 for the last; -1: none.
inline int32_t back(const Ids& history, int64_t places) {
  return places <= history.count ? history.ids[history.count - places] : -1;
}

inline int64_t window_start(const Ids& history, int32_t window) {
  return window < 0 ? 0 : std::max<int64_t>(0, history.count - window);
}

// Applied to all logits, before any other stage.
void rules(float* x, int64_t vocab, const Request& request) {
  const auto add = [&](int32_t id, float bias) {
    if (0 <= id && id < vocab) x[id] += bias;
  };
  for (int64_t i = 0; i < request.biased.count; ++i) add(request.biased.ids[i], request.biases[i]);
  if (request.drawn < request.counts[kMinTokens])
    for (int64_t i = 0; i < request.ends.count; ++i) add(request.ends.ids[i], -INFINITY);
  const int64_t length = request.word;
  for (int64_t i = 0; i + length <= request.bad_words.count; i += length) {
    const int32_t* const word = request.bad_words.ids + i;
    bool begun = true;
    for (int64_t j = 0; begun && j + 1 < length; ++j)
      begun = word[j] < 0 || word[j] == back(request.history, length - 1 - j);
    if (begun) add(word[length - 1], -INFINITY);
  }
}

void penalties(Candidates& candidates, const Request& request) {
  const Ids& history = request.history;
  const int64_t start = window_start(history, request.counts[kPenaltyLastN]);
  TokenMarks marks(candidates);  // bit 0: the token occurs; plus 2 for each time it was generated
  for (int64_t i = start; i < history.count; ++i) {
    const int32_t id = history.ids[i];
    if (marks.known(id)) marks.put(id, (marks[id] | 1) + (i >= request.prompt ? 2 : 0));
  }
  const float factor = request.numbers[kRepetitionPenalty];
  const float frequency = request.numbers[kFrequencyPenalty];
  const float presence = request.numbers[kPresencePenalty];
  float* const x = candidates.x();
  for (int64_t i = 0; i < candidates.count; ++i) {
    const int32_t mark = marks[candidates.id(i)];
    if (!mark) continue;
    const float scaled = x[i] > 0 ? x[i] / factor : x[i] * factor;
    const float taken = frequency * static_cast<float>(mark / 2) + (mark > 1 ? presence : 0.0f);
    x[i] = std::min(std::max(scaled - taken, -FLT_MAX), FLT_MAX);
  }
}

void dry(Candidates& candidates, const Request& request) {
  const Ids &history = request.history, &breakers = request.breakers;
  const int64_t start = window_start(history, request.counts[kDryPenaltyLastN]);
  const auto breaks = [&](int32_t id) {
    bool found = false;
    for (int64_t i = 0; i < breakers.count; ++i) found |= breakers.ids[i] == id;
    return found;
  };
  int64_t max_value = 0;  // tokens at the end that a match may span
  while (max_value < MAX_MATCH && max_value < history.count - start) {
    const int32_t id = back(history, max_value + 1);
    if (id < 0 || breaks(id)) break;
    ++max_value;
  }
  if (!max_value) return;
  TokenMarks matches(candidates);
  for (int64_t i = start + 1; i < history.count; ++i) {
    int32_t length = 0;
    while (length < max_value && i - 1 - length >= start &&
           history.ids[i - 1 - length] == back(history, length + 1))
      ++length;
    matches.raise(history.ids[i], length);
  }
  const float base = request.numbers[kDryBase], multiplier = request.numbers[kDryMultiplier];
  float* const x = candidates.x();
  for (int64_t i = 0; i < candidates.count; ++i) {
    const int32_t match = matches[candidates.id(i)],
                  excess = match - request.counts[kDryAllowedLength];
    if (!match || excess < 0 || breaks(candidates.id(i))) continue;
    // Finite, so that a penalized token stays likelier than a forbidden one.
    const float taken = std::min(multiplier * std::pow(base, static_cast<float>(excess)), 1e30f);
    x[i] = std::max(x[i] - taken, -FLT_MAX);
  }
}

// Smoothed n-gram model of the sequence, for some tokens: from the longest context down, each takes
// a share of the remaining mass.
void predict(Candidates& candidates, const Request& request, const Array<int32_t>& tokens,
             float* predicted) {
  const Ids& history = request.history;
  const int32_t n = request.counts[kFsdN];
  const float beta = request.numbers[kFsdBeta];
  int64_t followed[MAX_NGRAM] = {}, by[MAX_CANDIDATES][MAX_NGRAM] = {};
  TokenMarks places(candidates);
  for (size_t i = 0; i < tokens.size(); ++i) places.put(tokens[i], static_cast<int32_t>(i + 1));
  for (int64_t i = 0; i < history.count; ++i) {
    const int32_t id = history.ids[i];
    if (id < 0) continue;
    const int32_t place = places.known(id) ? places[id] : 0;
    for (int64_t context = 0; context < MAX_NGRAM; ++context) {
      if (context > i || (context && history.ids[i - context] != back(history, context))) break;
      ++followed[context];
      if (place) ++by[place - 1][context];
    }
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    float sum = 0, rest = 1;
    const int64_t longest = history.count >= n - 1 ? std::min<int64_t>(n, MAX_NGRAM) - 1 : -1;
    for (int64_t context = longest; context >= 0; --context) {
      const float count = static_cast<float>(by[i][context]);
      if (!count) continue;
      const float times = static_cast<float>(followed[context]);
      sum += rest * (context ? beta * count / (times + 1) : count / std::max(times, 1.0f));
      rest *= 1 - beta;
    }
    predicted[i] = sum;
  }
}

void fsd(Candidates& candidates, const Request& request) {
  const int32_t* const counts = request.counts;
  // Only random FSD samples; it leaves its first tokens to other stages at random.
  const float u = uniform(request.key, RandomStream::random_fsd, request.drawn);
  const bool now = request.drawn >= counts[kRandomFsdTokens] || !counts[kDraws] ||
                   u < request.numbers[kRandomFsdProbability];
  if (!now) return;
  const float* const x = candidates.x();
  const int64_t count = std::min(MAX_CANDIDATES, candidates.count);
  const float max_value = max_of(x, candidates.count);
  const Array<int64_t> best = top_indices(x, candidates.count, count);
  Array<int32_t> tokens;
  for (const int64_t i : best) tokens.push_back(candidates.id(i));

  const int64_t pool = counts[kFsdPool] ? counts[kFsdPool] : candidates.vocab;
  float total = 0;
  if (counts[kFsdPool]) {
    for (int64_t i = 0; i < std::min(count, pool); ++i) total += std::exp(x[best[i]] - max_value);
  } else {
    total = softmax_weights(candidates);
  }
  float predicted[MAX_CANDIDATES];
  predict(candidates, request, tokens, predicted);
  const float alpha = request.numbers[kFsdAlpha];
  float greatest = -INFINITY;
  int32_t chosen = tokens[0];
  for (int64_t i = 0; i < std::min<int64_t>(count, counts[kFsdK]); ++i) {
    const float p = i < pool ? std::exp(x[best[i]] - max_value) / total : 0.0f;
    const float score = (1 - alpha) * p - alpha * predicted[i];
    if (score > greatest) greatest = score, chosen = tokens[i];
  }
  candidates.x()[0] = 0;
  candidates.scratch.ids[0] = chosen;
  candidates.count = 1;
  candidates.whole = false;
}

}  // namespace
}  // namespace jinfer
