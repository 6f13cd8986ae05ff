// Temperature and truncation stages: top-k, top-p, min-p and others
// (jinfer/sampling/truncation.py).
#pragma once

#include "sample/candidates.h"
#include "sample/sample.h"
#include "sample/sample_rng.h"
#include "simd/elementary.h"

namespace jinfer {
namespace {

constexpr float LN2 = 0.6931471805599453f;

void divide(Candidates& candidates, float scale) {
  const Floats max_value = broadcast(max_of(candidates.x(), candidates.count));
  const Floats by = broadcast(std::max(scale, 1e-37f));
  map_vectors(candidates.x(), candidates.count, candidates.x(),
              [&](Floats v) { return (v - max_value) / by; });
  candidates.drop_infinite();  // overflowed quotients
}

// Sets `scratch.weights` to exp(x - maximum) and returns their sum.
float softmax_weights(Candidates& candidates) {
  const Floats max_value = broadcast(max_of(candidates.x(), candidates.count));
  float* const weights = candidates.scratch.weights.data();
  map_vectors(candidates.x(), candidates.count, weights,
              [&](Floats v) { return exponential(v - max_value); });
  return sum_of(weights, candidates.count);
}

// Writes log-probabilities to `to`, which may be x itself.
void log_softmax(Candidates& candidates, float* to) {
  const Floats max_value = broadcast(max_of(candidates.x(), candidates.count));
  const Floats total = broadcast(std::log(softmax_weights(candidates)));
  map_vectors(candidates.x(), candidates.count, to,
              [&](Floats v) { return v - max_value - total; });
}

// Entropy in nats; sets `scratch.keys` to log-probabilities.
float entropy(Candidates& candidates) {
  float *const keys = candidates.scratch.keys.data(), *const parts =
                                                          candidates.scratch.parts.data();
  log_softmax(candidates, keys);
  map_vectors(keys, candidates.count, parts, [](Floats v) {
    const Floats p = exponential(v);
    return p > Floats{} ? p * v : Floats{};
  });
  return -sum_of(parts, candidates.count);
}

void dynatemp(Candidates& candidates, float scale, float spread, float exponent) {
  const float share = entropy(candidates) / std::log(static_cast<float>(candidates.count));
  const float coldest = std::max(scale - spread, 0.0f);
  const float power = std::pow(std::min(std::max(share, 0.0f), 1.0f), exponent);
  const float dynamic = coldest + (scale + spread - coldest) * power;
  // For a single candidate the normalized entropy is 0 / 0, and the temperature does not matter.
  divide(candidates, candidates.count > 1 && std::isfinite(dynamic) ? dynamic : scale);
}

void top_n_sigma(Candidates& candidates, float n) {
  const float mean = sum_of(candidates.x(), candidates.count) / candidates.count;
  float* const squares = candidates.scratch.parts.data();
  const Floats m = broadcast(mean);
  map_vectors(candidates.x(), candidates.count, squares,
              [&](Floats v) { return (v - m) * (v - m); });
  const float deviation = std::sqrt(sum_of(squares, candidates.count) / candidates.count);
  candidates.keep(max_of(candidates.x(), candidates.count) - n * deviation);
}

void top_k(Candidates& candidates, int32_t k) {
  if (k < candidates.count)
    candidates.keep(kth_largest(candidates.x(), candidates.count, std::max(k, 1)));
}

void tfs_z(Candidates& candidates, float share) {
  const int64_t count = candidates.count;
  float* const sorted = candidates.scratch.keys.data();
  memcpy(sorted, candidates.x(), 4 * count);
  sort_descending(sorted, count, candidates.scratch.parts.data());
  const float total = softmax_weights(candidates), max_value = sorted[0];
  float* const p = candidates.scratch.weights.data();
  map_vectors(sorted, count, p, [&](Floats v) { return exponential(v - max_value) / total; });
  // Dropped tokens have probability 0 and end the curve.
  const auto at = [&](int64_t i) { return i < count ? p[i] : 0.0f; };
  const int64_t places = std::min(count, candidates.vocab - 2);
  const auto curve = [&](int64_t i) {
    return static_cast<double>(std::abs((at(i) - at(i + 1)) - (at(i + 1) - at(i + 2))));
  };
  double whole = 0, so_far = 0;
  for (int64_t i = 0; i < places; ++i) whole += curve(i);
  for (int64_t i = 0; i < places; ++i)
    if ((so_far += curve(i)) > share * whole) return candidates.keep(sorted[i]);
}

void typical_p(Candidates& candidates, float share) {
  const float expected = entropy(candidates);
  float *const keys = candidates.scratch.keys.data(), *const weights =
                                                          candidates.scratch.weights.data();
  float* const again = candidates.scratch.parts.data();
  map_vectors(keys, candidates.count, weights, exponential);
  map_vectors(keys, candidates.count, keys, [&](Floats v) {
    v += expected;
    return v < Floats{} ? v : -v;
  });
  memcpy(again, keys, 4 * candidates.count);
  const float mass = share * sum_of(weights, candidates.count);
  candidates.keep(keys, mass_threshold(again, weights, candidates.count, mass));
}

void top_p(Candidates& candidates, float share) {
  const float mass = share * softmax_weights(candidates);
  float* const keys = candidates.scratch.keys.data();
  memcpy(keys, candidates.x(), 4 * candidates.count);
  candidates.keep(mass_threshold(keys, candidates.scratch.weights.data(), candidates.count, mass));
}

void min_p(Candidates& candidates, float share) {
  softmax_weights(candidates);
  candidates.keep(candidates.scratch.weights.data(), share);
}

void top_a(Candidates& candidates, float share) {
  const float total = softmax_weights(candidates);
  candidates.keep(candidates.scratch.weights.data(), share / total);
}

void xtc(Candidates& candidates, const Request& request) {
  if (uniform(request.key, RandomStream::xtc, request.drawn) >= request.numbers[kXtcProbability])
    return;
  const float total = softmax_weights(candidates), threshold = request.numbers[kXtcThreshold];
  float* const p = candidates.scratch.weights.data();
  float least = INFINITY;
  for (int64_t i = 0; i < candidates.count; ++i) {
    p[i] /= total;
    if (p[i] >= threshold) least = std::min(least, p[i]);
  }
  if (least == INFINITY) return;
  map_vectors(p, candidates.count, p, [](Floats v) { return -v; });
  candidates.keep(p, -least);
}

// Number of tokens whose mean surprise is mu bits under Zipf's law.
int32_t zipf_k(Candidates& candidates, float mu) {
  constexpr int64_t FITTED = 100;
  thread_local Array<float> best;
  const int64_t some = std::min(FITTED, candidates.count);
  at_least(candidates.x(), candidates.count, kth_largest(candidates.x(), candidates.count, some),
           best);
  std::sort(best.begin(), best.end(), Descending());
  float falls = 0, squares = 0;
  for (int64_t i = 1; i < some; ++i) {
    const float step = std::log((i + 1.0f) / i);
    falls += (best[i - 1] - best[i]) * step;
    squares += step * step;
  }
  const float s = std::max(falls / std::max(squares, 1e-30f), 1e-6f);
  const float e = std::abs(s - 1) < 1e-6f ? 1e-6f : s - 1;
  const float size = std::log(static_cast<float>(candidates.vocab));
  const float log_k = (std::log(e / -std::expm1(-e * size)) + mu * LN2) / s;
  return static_cast<int32_t>(std::exp(std::min(std::max(log_k, 0.0f), size)));
}

void mirostat(Candidates& candidates, int32_t version, float mu) {
  log_softmax(candidates, candidates.x());
  candidates.drop_infinite();
  if (version == 1) return top_k(candidates, zipf_k(candidates, mu));
  candidates.keep(std::min(max_of(candidates.x(), candidates.count), -LN2 * mu));
}

}  // namespace
}  // namespace jinfer
