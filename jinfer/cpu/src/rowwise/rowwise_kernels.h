// Row-wise kernels, compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>

#include "rowwise/glu.h"
#include "rowwise/rowwise.h"
#include "simd/elementary.h"

namespace jinfer {
namespace {

constexpr int ACCUMULATORS = 4;  // independent sums, to hide the latency of additions

// Calls f(at, count) for the vectors of a row; `count` is LANES but for the remainder.
template <class F>
inline void for_vectors(int64_t size, F f) {
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) f(at, LANES);
  if (at < size) f(at, size - at);
}

inline Floats load_up_to(const float* from, int64_t count) {
  return count == LANES ? load(from) : load_partial(from, count);
}

inline void store_up_to(float* to, Floats x, int64_t count) { memcpy(to, &x, 4 * count); }

// The sum of f(x) over a row; f(0) need not be 0.
template <class F>
inline float sum_of(const float* x, int64_t size, F f) {
  Floats sum[ACCUMULATORS] = {};
  int64_t at = 0;
  for (; at + ACCUMULATORS * LANES <= size; at += ACCUMULATORS * LANES)
    for (int i = 0; i < ACCUMULATORS; ++i) sum[i] += f(load(x + at + i * LANES));
  for (int i = 0; at + LANES <= size; at += LANES, ++i) sum[i] += f(load(x + at));
  Floats rest = {};
  if (at < size) {
    rest = f(load_partial(x + at, size - at));
    for (int64_t i = size - at; i < LANES; ++i) rest[i] = 0;
  }
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]) + rest);
}

void norm(const float* x, int64_t size, const Norm& norm, float* y) {
  const float count = static_cast<float>(size);
  const Floats mean =
      broadcast(norm.centered ? sum_of(x, size, [](Floats v) { return v; }) / count : 0.0f);
  const float square = sum_of(x, size, [=](Floats v) { return (v - mean) * (v - mean); });
  const Floats scale = broadcast(1.0f / std::sqrt(square / count + norm.eps));
  for_vectors(size, [&](int64_t at, int64_t count) {
    Floats v = (load_up_to(x + at, count) - mean) * scale;
    if (norm.weight) v = v * (load_up_to(norm.weight + at, count) + norm.offset);
    if (norm.bias) v = v + load_up_to(norm.bias + at, count);
    store_up_to(y + at, v, count);
  });
}

// Keeps the compiler from fusing a product with a sum.
inline Floats rounded(Floats product) {
#if defined(__x86_64__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

// Rotates a head whose pairs are half a head apart.
void rotate_halves(const float* x, const float* cos, const float* sin, int64_t pairs, float* y) {
  for_vectors(pairs, [&](int64_t at, int64_t count) {
    const Floats a = load_up_to(x + at, count), b = load_up_to(x + pairs + at, count);
    const Floats c = load_up_to(cos + at, count), s = load_up_to(sin + at, count);
    store_up_to(y + at, rounded(a * c) - rounded(b * s), count);
    store_up_to(y + pairs + at, rounded(b * c) + rounded(a * s), count);
  });
}

// Rotates a head whose pairs are neighbours.
void rotate_adjacent(const float* x, const float* cos, const float* sin, int64_t pairs, float* y) {
  for_vectors(pairs, [&](int64_t at, int64_t count) {
    Floats a = {}, b = {};
    for (int64_t i = 0; i < count; ++i) a[i] = x[2 * (at + i)], b[i] = x[2 * (at + i) + 1];
    const Floats c = load_up_to(cos + at, count), s = load_up_to(sin + at, count);
    const Floats first = rounded(a * c) - rounded(b * s), second = rounded(b * c) + rounded(a * s);
    for (int64_t i = 0; i < count; ++i) y[2 * (at + i)] = first[i], y[2 * (at + i) + 1] = second[i];
  });
}

void rotate(const float* x, const float* cos, const float* sin, int64_t size,
            const Rotation& rotation, float* y) {
  const int64_t pairs = rotation.pairs, rest = rotation.size - 2 * pairs;
  for (int64_t head = 0; head < size; head += rotation.size) {
    (rotation.adjacent ? rotate_adjacent : rotate_halves)(x + head, cos, sin, pairs, y + head);
    if (rest) memcpy(y + head + 2 * pairs, x + head + 2 * pairs, 4 * rest);
  }
}

constexpr int64_t MAX_HADAMARD = 512;  // largest transform

// Signs of the Rudin-Shapiro sequence, which resembles no row of a Hadamard matrix.
struct Signs {
  float at[MAX_HADAMARD] = {};
  constexpr Signs() {
    for (int i = 0; i < MAX_HADAMARD; ++i) {
      int odd = 0;
      for (int bits = i & (i >> 1); bits; bits &= bits - 1) odd ^= 1;
      at[i] = odd ? -1.0f : 1.0f;
    }
  }
};
constexpr Signs SIGNS;

// Butterflies of lanes 1, 2, 4, ... apart.
template <int apart, int... lane>
inline Floats butterfly(Floats x, std::integer_sequence<int, lane...> lanes) {
  const Floats signs = {((lane & apart) ? -1.0f : 1.0f)...};
  return swapped<apart>(x, lanes) + x * signs;
}

template <int apart = 1>
inline Floats butterflies(Floats x) {
  if constexpr (apart == LANES) {
    return x;
  } else {
    return butterflies<2 * apart>(butterfly<apart>(x, std::make_integer_sequence<int, LANES>{}));
  }
}

// Transforms a part of a head; `size` is a power of two.
void hadamard_power_of_two(const float* x, int64_t size, float factor, float* y) {
  int64_t apart = 1;
  if (size < LANES) {
    for (int64_t i = 0; i < size; ++i) y[i] = x[i] * (factor * SIGNS.at[i]);
  } else {
    for (int64_t i = 0; i < size; i += LANES)
      store(y + i, butterflies(load(x + i) * (load(SIGNS.at + i) * factor)));
    apart = LANES;
  }
  const int64_t step = size < LANES ? 1 : LANES;
  for (; apart < size; apart *= 2)
    for (int64_t i = 0; i < size; i += 2 * apart)
      for (int64_t j = i; j < i + apart; j += step) {
        if (step == 1) {
          const float a = y[j], b = y[j + apart];
          y[j] = a + b, y[j + apart] = a - b;
        } else {
          const Floats a = load(y + j), b = load(y + j + apart);
          store(y + j, a + b), store(y + j + apart, a - b);
        }
      }
}

void hadamard(const float* x, int64_t size, const Hadamard& of, float* y) {
  for (int64_t head = 0; head < size; head += of.size)
    for (int64_t at = 0, part; at < of.size; at += part) {
      int bits = 0;
      while (2LL << bits <= std::min(of.size - at, MAX_HADAMARD)) ++bits;
      part = 1LL << bits;
      const int halvings = of.query ? bits - bits / 2 : bits / 2;
      hadamard_power_of_two(x + head + at, part, std::ldexp(1.0f, -halvings), y + head + at);
    }
}

void softmax(const float* x, int64_t size, float* y) {
  Floats max_value = broadcast(-INFINITY);
  for_vectors(size, [&](int64_t at, int64_t count) {
    Floats v = broadcast(-INFINITY);
    memcpy(&v, x + at, 4 * count);
    max_value = larger(max_value, v);
  });
  max_value = max_lane(max_value);
  for_vectors(size, [&](int64_t at, int64_t count) {
    store_up_to(y + at, exponential(load_up_to(x + at, count) - max_value), count);
  });
  const Floats sum = broadcast(sum_of(y, size, [](Floats v) { return v; }));
  for_vectors(size, [&](int64_t at, int64_t count) {
    store_up_to(y + at, load_up_to(y + at, count) / sum, count);
  });
}

void activate(const float* x, Activation activation, int64_t size, float* y) {
  dispatch_activation(activation, [=](auto f) {
    for_vectors(size, [=](int64_t at, int64_t count) {
      store_up_to(y + at, f(load_up_to(x + at, count)), count);
    });
  });
}

void add(const float* a, const float* b, int64_t size, float* y) {
  for_vectors(size, [&](int64_t at, int64_t count) {
    store_up_to(y + at, load_up_to(a + at, count) + load_up_to(b + at, count), count);
  });
}

void multiply(const float* a, const float* b, int64_t size, float* y) {
  for_vectors(size, [&](int64_t at, int64_t count) {
    store_up_to(y + at, load_up_to(a + at, count) * load_up_to(b + at, count), count);
  });
}

void scale(const float* x, float factor, int64_t size, float* y) {
  for_vectors(size, [&](int64_t at, int64_t count) {
    store_up_to(y + at, load_up_to(x + at, count) * factor, count);
  });
}

void weighted_sum(const float* x, const int32_t* places, const float* weights, int64_t count,
                  int64_t size, float* y) {
  for_vectors(size, [&](int64_t at, int64_t width) {
    Floats sum = {};
    for (int64_t k = 0; k < count; ++k) {
      const Floats part = rounded(load_up_to(x + places[k] * size + at, width) * weights[k]);
      sum = k ? sum + part : part;
    }
    store_up_to(y + at, sum, width);
  });
}

// Each lane keeps its maximum and the first index of it.
Argmax argmax(const float* x, int64_t size) {
  Floats max_value[ACCUMULATORS], odd = {};
  Ints place[ACCUMULATORS], at[ACCUMULATORS];
  for (int i = 0; i < ACCUMULATORS; ++i) {
    max_value[i] = broadcast(-INFINITY);
    for (int lane = 0; lane < LANES; ++lane) place[i][lane] = i * LANES + lane;
    at[i] = place[i];
  }
  const auto look = [&](Floats v, int i) {
    odd += v != v ? broadcast(1.0f) : Floats{};
    at[i] = v > max_value[i] ? place[i] : at[i];
    max_value[i] = larger(v, max_value[i]);
    place[i] += ACCUMULATORS * LANES;
  };
  int64_t begin = 0;
  for (; begin + ACCUMULATORS * LANES <= size; begin += ACCUMULATORS * LANES)
    for (int i = 0; i < ACCUMULATORS; ++i) look(load(x + begin + i * LANES), i);
  for (int i = 0; begin < size; begin += LANES, ++i) {
    Floats v = broadcast(-INFINITY);
    memcpy(&v, x + begin, 4 * std::min<int64_t>(LANES, size - begin));
    look(v, i);
  }
  Argmax found{-INFINITY, size, sum_lanes(odd) > 0};
  for (int i = 0; i < ACCUMULATORS; ++i)
    for (int lane = 0; lane < LANES; ++lane) {
      const float value = max_value[i][lane];
      if (value > found.value || (value == found.value && at[i][lane] < found.at))
        found = {value, at[i][lane], found.has_nan};
    }
  return found;
}

const RowwiseKernels kRowwise = {norm, rotate,   hadamard,     softmax, activate,
                                 add,  multiply, weighted_sum, scale,   argmax};

}  // namespace
}  // namespace jinfer
