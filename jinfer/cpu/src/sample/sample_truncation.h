// The stages that look at nothing but numbers: jinfer/sampling/{temperature,truncation,mirostat}.py.
#pragma once

#include "sample/candidates.h"
#include "sample/sample.h"
#include "sample/sample_rng.h"

namespace jinfer {
namespace {

constexpr float LN2 = 0.6931471805599453f;

void divide(Left& left, float scale) {
  const Floats most = all(greatest_of(left.x(), left.count));
  const Floats by = all(std::max(scale, 1e-37f));
  map(left.x(), left.count, left.x(), [&](Floats v) { return (v - most) / by; });
  left.drop_infinite();  // quotients beyond what there is
}

// `scratch.weights` become probabilities in units of the greatest, of which this is the sum.
float weigh(Left& left) {
  const Floats most = all(greatest_of(left.x(), left.count));
  float* const weights = left.scratch.weights.data();
  map(left.x(), left.count, weights, [&](Floats v) { return exponential(v - most); });
  return sum_of(weights, left.count);
}

// `to` becomes logarithms of probabilities, which may be the numbers themselves.
void log_softmax(Left& left, float* to) {
  const Floats most = all(greatest_of(left.x(), left.count));
  const Floats total = all(std::log(weigh(left)));
  map(left.x(), left.count, to, [&](Floats v) { return v - most - total; });
}

// In nats; `scratch.keys` become logarithms of probabilities.
float entropy(Left& left) {
  float *const keys = left.scratch.keys.data(), *const parts = left.scratch.parts.data();
  log_softmax(left, keys);
  map(keys, left.count, parts, [](Floats v) {
    const Floats p = exponential(v);
    return p > Floats{} ? p * v : Floats{};
  });
  return -sum_of(parts, left.count);
}

void dynatemp(Left& left, float scale, float spread, float exponent) {
  const float share = entropy(left) / std::log(static_cast<float>(left.count));
  const float coldest = std::max(scale - spread, 0.0f);
  const float power = std::pow(std::min(std::max(share, 0.0f), 1.0f), exponent);
  const float dynamic = coldest + (scale + spread - coldest) * power;
  // Of a single token the entropy's share is 0 / 0, and its temperature makes no difference.
  divide(left, left.count > 1 && std::isfinite(dynamic) ? dynamic : scale);
}

void top_n_sigma(Left& left, float n) {
  const float mean = sum_of(left.x(), left.count) / left.count;
  float* const squares = left.scratch.parts.data();
  const Floats m = all(mean);
  map(left.x(), left.count, squares, [&](Floats v) { return (v - m) * (v - m); });
  const float deviation = std::sqrt(sum_of(squares, left.count) / left.count);
  left.keep(greatest_of(left.x(), left.count) - n * deviation);
}

void top_k(Left& left, int32_t k) {
  if (k < left.count) left.keep(at_place(left.x(), left.count, std::max(k, 1)));
}

void tfs_z(Left& left, float share) {
  const int64_t count = left.count;
  float* const sorted = left.scratch.keys.data();
  memcpy(sorted, left.x(), 4 * count);
  sort_falling(sorted, count, left.scratch.parts.data());
  const float total = weigh(left), most = sorted[0];
  float* const p = left.scratch.weights.data();
  map(sorted, count, p, [&](Floats v) { return exponential(v - most) / total; });
  // What was dropped has no probability, and ends the curve as what there is would.
  const auto at = [&](int64_t i) { return i < count ? p[i] : 0.0f; };
  const int64_t places = std::min(count, left.vocab - 2);
  const auto curve = [&](int64_t i) {
    return static_cast<double>(std::abs((at(i) - at(i + 1)) - (at(i + 1) - at(i + 2))));
  };
  double whole = 0, so_far = 0;
  for (int64_t i = 0; i < places; ++i) whole += curve(i);
  for (int64_t i = 0; i < places; ++i)
    if ((so_far += curve(i)) > share * whole) return left.keep(sorted[i]);
}

void typical_p(Left& left, float share) {
  const float expected = entropy(left);
  float *const keys = left.scratch.keys.data(), *const weights = left.scratch.weights.data();
  float* const again = left.scratch.parts.data();
  map(keys, left.count, weights, exponential);
  map(keys, left.count, keys, [&](Floats v) {
    v += expected;
    return v < Floats{} ? v : -v;
  });
  memcpy(again, keys, 4 * left.count);
  const float mass = share * sum_of(weights, left.count);
  left.keep(keys, weighing(again, weights, left.count, mass));
}

void top_p(Left& left, float share) {
  const float mass = share * weigh(left);
  float* const keys = left.scratch.keys.data();
  memcpy(keys, left.x(), 4 * left.count);
  left.keep(weighing(keys, left.scratch.weights.data(), left.count, mass));
}

void min_p(Left& left, float share) {
  weigh(left);
  left.keep(left.scratch.weights.data(), share);
}

void top_a(Left& left, float share) {
  const float total = weigh(left);
  left.keep(left.scratch.weights.data(), share / total);
}

void xtc(Left& left, const Request& request) {
  if (chance(request.key, Stream::xtc, request.drawn) >= request.numbers[kXtcProbability]) return;
  const float total = weigh(left), threshold = request.numbers[kXtcThreshold];
  float* const p = left.scratch.weights.data();
  float least = INFINITY;
  for (int64_t i = 0; i < left.count; ++i) {
    p[i] /= total;
    if (p[i] >= threshold) least = std::min(least, p[i]);
  }
  if (least == INFINITY) return;
  map(p, left.count, p, [](Floats v) { return -v; });
  left.keep(p, -least);
}

// How many of the likeliest would surprise by mu bits on average if they followed Zipf's law.
int32_t zipf_k(Left& left, float mu) {
  constexpr int64_t FITTED = 100;
  thread_local Array<float> best;
  const int64_t some = std::min(FITTED, left.count);
  reaching(left.x(), left.count, at_place(left.x(), left.count, some), best);
  std::sort(best.begin(), best.end(), Falling());
  float falls = 0, squares = 0;
  for (int64_t i = 1; i < some; ++i) {
    const float step = std::log((i + 1.0f) / i);
    falls += (best[i - 1] - best[i]) * step;
    squares += step * step;
  }
  const float s = std::max(falls / std::max(squares, 1e-30f), 1e-6f);
  const float e = std::abs(s - 1) < 1e-6f ? 1e-6f : s - 1;
  const float size = std::log(static_cast<float>(left.vocab));
  const float log_k = (std::log(e / -std::expm1(-e * size)) + mu * LN2) / s;
  return static_cast<int32_t>(std::exp(std::min(std::max(log_k, 0.0f), size)));
}

void mirostat(Left& left, int32_t version, float mu) {
  log_softmax(left, left.x());
  left.drop_infinite();
  if (version == 1) return top_k(left, zipf_k(left, mu));
  left.keep(std::min(greatest_of(left.x(), left.count), -LN2 * mu));
}

}  // namespace
}  // namespace jinfer
