// Sampling candidates: the tokens that remain after the stages so far, and how they are filtered.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <new>
#include <vector>

#include "simd/simd.h"

namespace jinfer {
namespace {

// Arrays with an allocator of this file's own: a linker keeps one definition of each function, and
// std::vector<float>'s, compiled for these instructions, may not serve other files. For the same
// reason there are loops instead of std::fill and the like.
template <class T>
struct LocalAllocator {
  using value_type = T;
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T))); }
  void deallocate(T* from, size_t) { ::operator delete(from); }
  bool operator==(const LocalAllocator&) const { return true; }
  bool operator!=(const LocalAllocator&) const { return false; }
};
template <class T>
using Array = std::vector<T, LocalAllocator<T>>;

struct Descending {
  bool operator()(float a, float b) const { return a > b; }
};

// Whether a comparison holds in any lane.
inline bool any(Ints which) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)which);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)which);
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)which);
#else
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) found |= which[i];
  return found;
#endif
}

// Calls f(i, vector of x at i) for all vectors; the last is padded with `rest`.
template <class F>
inline void for_vectors(const float* x, int64_t count, float rest, F f) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) f(i, load(x + i));
  if (i < count) {
    Floats last = broadcast(rest);
    memcpy(&last, x + i, 4 * (count - i));
    f(i, last);
  }
}

// A thread's buffers, sized for the largest vocabulary so far.
struct Scratch {
  Array<float> x, weights, keys, parts;
  Array<int32_t> ids;
  Array<int32_t> marks;  // per token; all 0 between uses

  void reserve(int64_t vocab) {
    if (static_cast<int64_t>(x.size()) >= vocab) return;
    for (auto* each : {&x, &weights, &keys, &parts}) each->resize(vocab);
    ids.resize(vocab);
    marks.resize(vocab);
  }

  static Scratch& local() {
    thread_local Scratch scratch;
    return scratch;
  }
};

// Logits in order of tokens, all finite: -inf is dropped, and no stage makes other logits infinite,
// which would break sums and order.
struct Candidates {
  Scratch& scratch;
  const int64_t vocab;
  int64_t count;
  bool whole = true;  // candidate i is token i, and `ids` is not written yet

  float* x() { return scratch.x.data(); }
  int32_t id(int64_t i) const { return whole ? static_cast<int32_t>(i) : scratch.ids[i]; }

  // Keeps candidates whose key is at least `least`.
  void keep(const float* keys, float least) {
    float* const x = scratch.x.data();
    int32_t* const ids = scratch.ids.data();
    const bool whole = this->whole;
    int64_t kept = 0;
    // Branch-free, as the outcome is unpredictable: dropped entries are overwritten.
    const auto look = [&](int64_t i) {
      const bool keeps = keys[i] >= least;
      x[kept] = x[i];
      ids[kept] = whole ? static_cast<int32_t>(i) : ids[i];
      kept += keeps;
    };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
      if (!any(load(keys + i) >= broadcast(least))) continue;
      for (int lane = 0; lane < LANES; ++lane) look(i + lane);
    }
    for (; i < count; ++i) look(i);
    count = kept;
    this->whole = false;
  }

  void keep(float least) { keep(x(), least); }
  void drop_infinite();
};

inline float max_of(const float* x, int64_t count) {
  Floats max_value = broadcast(-INFINITY);
  for_vectors(x, count, -INFINITY, [&](int64_t, Floats v) { max_value = larger(v, max_value); });
  return max_lane(max_value)[0];
}

inline float min_of(const float* x, int64_t count) {
  Floats least = broadcast(INFINITY);
  for_vectors(x, count, INFINITY, [&](int64_t, Floats v) { least = v < least ? v : least; });
  return -max_lane(-least)[0];
}

// Drops -inf.
inline void Candidates::drop_infinite() {
  if (min_of(x(), count) == -INFINITY) keep(-FLT_MAX);
}

inline float sum_of(const float* x, int64_t count) {
  Floats sum[4] = {};
  for_vectors(x, count, 0, [&](int64_t i, Floats v) { sum[i / LANES % 4] += v; });
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// y = f(x), vector by vector.
template <class F>
inline void map_vectors(const float* x, int64_t count, float* y, F f) {
  for_vectors(x, count, 0, [&](int64_t i, Floats v) {
    v = f(v);
    memcpy(y + i, &v, 4 * std::min<int64_t>(LANES, count - i));
  });
}

// A lower bound of the `requested` largest keys, often close: each of `requested` lanes of vectors
// reaches it. -inf if there are too few lanes.
inline float top_lower_bound(const float* keys, int64_t count, int64_t requested,
                             Array<float>& lanes) {
  constexpr int64_t RUN = 32;  // vectors
  lanes.clear();
  for (int64_t begin = 0; begin < count; begin += RUN * LANES) {
    Floats max_value = broadcast(-INFINITY);
    for_vectors(keys + begin, std::min(RUN * LANES, count - begin), -INFINITY,
                [&](int64_t, Floats v) { max_value = larger(v, max_value); });
    for (int i = 0; i < LANES; ++i) lanes.push_back(max_value[i]);
  }
  if (static_cast<int64_t>(lanes.size()) < requested) return -INFINITY;
  std::nth_element(lanes.begin(), lanes.begin() + (requested - 1), lanes.end(), Descending());
  return lanes[requested - 1];
}

// The keys >= least.
inline void at_least(const float* keys, int64_t count, float least, Array<float>& found) {
  found.clear();
  for_vectors(keys, count, -INFINITY, [&](int64_t, Floats v) {
    if (!any(v >= broadcast(least))) return;
    for (int lane = 0; lane < LANES; ++lane)
      if (v[lane] >= least) found.push_back(v[lane]);
  });
}

// The key at rank `place` in descending order, 1 to count.
inline float kth_largest(const float* keys, int64_t count, int64_t place) {
  thread_local Array<float> found;
  at_least(keys, count, top_lower_bound(keys, count, place, found), found);
  std::nth_element(found.begin(), found.begin() + (place - 1), found.end(), Descending());
  return found[place - 1];
}

// Indices of the `requested` largest keys in descending order, lower index first among equals;
// `requested` is 1 to count.
inline Array<int64_t> top_indices(const float* keys, int64_t count, int64_t requested) {
  const float least = kth_largest(keys, count, requested);
  Array<int64_t> best;
  for_vectors(keys, count, -INFINITY, [&](int64_t i, Floats v) {
    if (!any(v >= broadcast(least))) return;
    for (int64_t lane = 0; lane < std::min<int64_t>(LANES, count - i); ++lane)
      if (v[lane] >= least) best.push_back(i + lane);
  });
  std::sort(best.begin(), best.end(), [&](int64_t a, int64_t b) {
    return keys[a] > keys[b] || (keys[a] == keys[b] && a < b);
  });
  best.resize(requested);
  return best;
}

// The largest key such that keys >= it weigh at least `mass` together; the smallest key if all
// weigh less. Overwrites both arrays. Weighted quickselect (Hoare's FIND with sums instead of
// counts); the first pivot is reached by a few dozen keys, which mostly suffice.
inline float mass_threshold(float* keys, float* weights, int64_t count, float mass) {
  constexpr int64_t FEW = 64;
  thread_local Array<float> spare;
  mass = std::max(mass, 1e-30f);  // keeps at least one
  float pivot = top_lower_bound(keys, count, FEW, spare);
  while (count > FEW) {
    Floats reach[2] = {}, above[2] = {};
    const Floats p = broadcast(pivot);
    for_vectors(keys, count, -INFINITY, [&](int64_t i, Floats v) {
      Floats w = {};
      memcpy(&w, weights + i, 4 * std::min<int64_t>(LANES, count - i));
      reach[i / LANES % 2] += v >= p ? w : Floats{};
      above[i / LANES % 2] += v > p ? w : Floats{};
    });
    const float reached = sum_lanes(reach[0] + reach[1]), over = sum_lanes(above[0] + above[1]);
    if (over < mass && reached >= mass) return pivot;
    const bool higher = over >= mass;
    int64_t kept = 0;
    for_vectors(keys, count, higher ? -INFINITY : INFINITY, [&](int64_t i, Floats v) {
      if (!any(higher ? v > p : v < p)) return;
      const int64_t lanes = std::min<int64_t>(LANES, count - i);
      for (int lane = 0; lane < lanes; ++lane) {  // branch-free, as above
        const bool keeps = higher ? v[lane] > pivot : v[lane] < pivot;
        weights[kept] = weights[i + lane];
        keys[kept] = v[lane];
        kept += keeps;
      }
    });
    if (!higher && !kept) return pivot;  // rounding: all weigh less than expected
    if (!higher) mass -= reached;
    count = kept;
    float some[9];
    for (int i = 0; i < 9; ++i) some[i] = keys[count * (2 * i + 1) / 18];
    std::nth_element(some, some + 4, some + 9, Descending());
    pivot = some[4];
  }
  int64_t order[FEW];
  for (int64_t i = 0; i < count; ++i) order[i] = i;
  std::sort(order, order + count, [&](int64_t a, int64_t b) { return keys[a] > keys[b]; });
  float sum = 0;
  for (int64_t i = 0; i < count; ++i)
    if ((sum += weights[order[i]]) >= mass) return keys[order[i]];
  return count ? keys[order[count - 1]] : -INFINITY;
}

// Radix sort in descending order, 11 bits at a time.
inline void sort_descending(float* x, int64_t count, float* spare) {
  const auto key = [](float v) {
    uint32_t bits;
    v += 0.0f;  // -0 is 0
    memcpy(&bits, &v, 4);
    return ~(bits & 0x80000000u ? ~bits : bits | 0x80000000u);
  };
  for (int shift = 0; shift < 33; shift += 11) {
    int64_t places[2049] = {};
    for (int64_t i = 0; i < count; ++i) ++places[(key(x[i]) >> shift & 2047) + 1];
    for (int i = 0; i < 2048; ++i) places[i + 1] += places[i];
    for (int64_t i = 0; i < count; ++i) spare[places[key(x[i]) >> shift & 2047]++] = x[i];
    float* const sorted = spare;
    spare = x;
    x = sorted;
  }
  memcpy(spare, x, 4 * count);  // after three passes the result is in the spare buffer
}

}  // namespace
}  // namespace jinfer
