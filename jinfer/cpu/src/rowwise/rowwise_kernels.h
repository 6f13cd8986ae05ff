// The kernels of rowwise.h, for the instructions that the including file is compiled for.
#pragma once

#include <algorithm>
#include <cmath>

#include "rowwise/glu.h"
#include "rowwise/rowwise.h"

namespace jinfer {
namespace {

constexpr int SIDE = 4;  // sums side by side, so that an addition does not wait for the one before

// f(at, count) for the vectors of a row: `count` is LANES but for the last one, which is filled up.
template <class F>
inline void each_vector(int64_t size, F f) {
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) f(at, LANES);
  if (at < size) f(at, size - at);
}

inline Floats some(const float* from, int64_t count) {
  return count == LANES ? load(from) : load_some(from, count);
}

inline void put(float* to, Floats x, int64_t count) { memcpy(to, &x, 4 * count); }

// The sum of f(x) over a row, where f(0) = 0 or the row fills its vectors.
template <class F>
inline float sum_of(const float* x, int64_t size, F f) {
  Floats sum[SIDE] = {};
  int64_t at = 0;
  for (; at + SIDE * LANES <= size; at += SIDE * LANES)
    for (int i = 0; i < SIDE; ++i) sum[i] += f(load(x + at + i * LANES));
  for (int i = 0; at + LANES <= size; at += LANES, ++i) sum[i] += f(load(x + at));
  Floats rest = {};
  if (at < size) {
    rest = f(load_some(x + at, size - at));
    for (int64_t i = size - at; i < LANES; ++i) rest[i] = 0;
  }
  return total((sum[0] + sum[1]) + (sum[2] + sum[3]) + rest);
}

void norm(const float* x, int64_t size, const Norm& norm, float* y) {
  const float count = static_cast<float>(size);
  const Floats mean =
      all(norm.centered ? sum_of(x, size, [](Floats v) { return v; }) / count : 0.0f);
  const float square = sum_of(x, size, [=](Floats v) { return (v - mean) * (v - mean); });
  const Floats scale = all(1.0f / std::sqrt(square / count + norm.eps));
  each_vector(size, [&](int64_t at, int64_t count) {
    Floats v = (some(x + at, count) - mean) * scale;
    if (norm.weight) v = v * (some(norm.weight + at, count) + norm.offset);
    if (norm.bias) v = v + some(norm.bias + at, count);
    put(y + at, v, count);
  });
}

// A product that no instruction rounds together with a sum.
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

// One head of which pairs are halves apart.
void rotate_halves(const float* x, const float* cos, const float* sin, int64_t pairs, float* y) {
  each_vector(pairs, [&](int64_t at, int64_t count) {
    const Floats a = some(x + at, count), b = some(x + pairs + at, count);
    const Floats c = some(cos + at, count), s = some(sin + at, count);
    put(y + at, rounded(a * c) - rounded(b * s), count);
    put(y + pairs + at, rounded(b * c) + rounded(a * s), count);
  });
}

// One head of which pairs are neighbours.
void rotate_neighbours(const float* x, const float* cos, const float* sin, int64_t pairs, float* y) {
  each_vector(pairs, [&](int64_t at, int64_t count) {
    Floats a = {}, b = {};
    for (int64_t i = 0; i < count; ++i) a[i] = x[2 * (at + i)], b[i] = x[2 * (at + i) + 1];
    const Floats c = some(cos + at, count), s = some(sin + at, count);
    const Floats first = rounded(a * c) - rounded(b * s), second = rounded(b * c) + rounded(a * s);
    for (int64_t i = 0; i < count; ++i) y[2 * (at + i)] = first[i], y[2 * (at + i) + 1] = second[i];
  });
}

void rotate(const float* x, const float* cos, const float* sin, int64_t size,
            const Rotation& rotation, float* y) {
  const int64_t pairs = rotation.pairs, rest = rotation.size - 2 * pairs;
  for (int64_t head = 0; head < size; head += rotation.size) {
    (rotation.adjacent ? rotate_neighbours : rotate_halves)(x + head, cos, sin, pairs, y + head);
    if (rest) memcpy(y + head + 2 * pairs, x + head + 2 * pairs, 4 * rest);
  }
}

constexpr int64_t PART = 512;  // of a head that is transformed together, at most

// +1 and -1 as in the Rudin-Shapiro sequence, which no row of a Hadamard matrix is like.
struct Signs {
  float at[PART] = {};
  constexpr Signs() {
    for (int i = 0; i < PART; ++i) {
      int odd = 0;
      for (int bits = i & (i >> 1); bits; bits &= bits - 1) odd ^= 1;
      at[i] = odd ? -1.0f : 1.0f;
    }
  }
};
constexpr Signs SIGNS;

// Sums and differences of lanes 1, 2, 4, ... apart.
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
    return butterflies<2 * apart>(
        butterfly<apart>(x, std::make_integer_sequence<int, LANES>{}));
  }
}

// A part of a head: `size` is a power of two.
void hadamard_part(const float* x, int64_t size, float factor, float* y) {
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
      while (2LL << bits <= std::min(of.size - at, PART)) ++bits;
      part = 1LL << bits;
      const int halvings = of.query ? bits - bits / 2 : bits / 2;
      hadamard_part(x + head + at, part, std::ldexp(1.0f, -halvings), y + head + at);
    }
}

void softmax(const float* x, int64_t size, float* y) {
  Floats most = all(-INFINITY);
  each_vector(size, [&](int64_t at, int64_t count) {
    Floats v = all(-INFINITY);
    memcpy(&v, x + at, 4 * count);
    most = larger(most, v);
  });
  most = highest(most);
  each_vector(size, [&](int64_t at, int64_t count) {
    put(y + at, exponential(some(x + at, count) - most), count);
  });
  const Floats sum = all(sum_of(y, size, [](Floats v) { return v; }));
  each_vector(size, [&](int64_t at, int64_t count) {
    put(y + at, some(y + at, count) / sum, count);
  });
}

void sigmoid(const float* x, int64_t size, float* y) {
  each_vector(size, [&](int64_t at, int64_t count) {
    put(y + at, 1.0f / one_and_exponential(some(x + at, count)), count);
  });
}

void activate(const float* x, Activation activation, int64_t size, float* y) {
  with(activation, [=](auto f) {
    each_vector(size, [=](int64_t at, int64_t count) { put(y + at, f(some(x + at, count)), count); });
  });
}

void add(const float* a, const float* b, int64_t size, float* y) {
  each_vector(size, [&](int64_t at, int64_t count) {
    put(y + at, some(a + at, count) + some(b + at, count), count);
  });
}

void multiply(const float* a, const float* b, int64_t size, float* y) {
  each_vector(size, [&](int64_t at, int64_t count) {
    put(y + at, some(a + at, count) * some(b + at, count), count);
  });
}

void scale(const float* x, float factor, int64_t size, float* y) {
  each_vector(size,
              [&](int64_t at, int64_t count) { put(y + at, some(x + at, count) * factor, count); });
}

void weighted_sum(const float* x, const int32_t* places, const float* weights, int64_t count,
                  int64_t size, float* y) {
  each_vector(size, [&](int64_t at, int64_t width) {
    Floats sum = {};
    for (int64_t k = 0; k < count; ++k) {
      const Floats part = rounded(some(x + places[k] * size + at, width) * weights[k]);
      sum = k ? sum + part : part;
    }
    put(y + at, sum, width);
  });
}

// Each lane keeps the greatest of its numbers and where it stands first.
Greatest greatest(const float* x, int64_t size) {
  Floats most[SIDE], odd = {};
  Ints place[SIDE], at[SIDE];
  for (int i = 0; i < SIDE; ++i) {
    most[i] = all(-INFINITY);
    for (int lane = 0; lane < LANES; ++lane) place[i][lane] = i * LANES + lane;
    at[i] = place[i];
  }
  const auto look = [&](Floats v, int i) {
    odd += v != v ? all(1.0f) : Floats{};
    at[i] = v > most[i] ? place[i] : at[i];
    most[i] = larger(v, most[i]);
    place[i] += SIDE * LANES;
  };
  int64_t begin = 0;
  for (; begin + SIDE * LANES <= size; begin += SIDE * LANES)
    for (int i = 0; i < SIDE; ++i) look(load(x + begin + i * LANES), i);
  for (int i = 0; begin < size; begin += LANES, ++i) {
    Floats v = all(-INFINITY);
    memcpy(&v, x + begin, 4 * std::min<int64_t>(LANES, size - begin));
    look(v, i);
  }
  Greatest found{-INFINITY, size, total(odd) > 0};
  for (int i = 0; i < SIDE; ++i)
    for (int lane = 0; lane < LANES; ++lane) {
      const float value = most[i][lane];
      if (value > found.value || (value == found.value && at[i][lane] < found.at))
        found = {value, at[i][lane], found.missing};
    }
  return found;
}

const RowwiseKernels kRowwise = {norm, rotate,   hadamard,     softmax, sigmoid, activate,
                          add,  multiply, weighted_sum, scale,   greatest};

}  // namespace
}  // namespace jinfer
