// Mixture of experts: handlers of `jinfer_route` (top-k routing), `jinfer_sort_by_expert` and
// `jinfer_combine_experts` (weighted sum), in place of some forty small XLA operations per layer.
#include <algorithm>
#include <string>
#include <vector>

#include "common/buffer_checks.h"
#include "common/handler.h"
#include "common/parallel_rows.h"
#include "rowwise/rowwise.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

// Indices of the `count` largest scores, lower index first among equals; always `count`, even among
// NaNs.
void top_k(const float* ranked, std::vector<char>& taken, int64_t count, int32_t* chosen) {
  const int64_t experts = taken.size();
  std::fill(taken.begin(), taken.end(), 0);
  for (int64_t k = 0; k < count; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < experts; ++i)
      if (!taken[i] && (best < 0 || ranked[i] > ranked[best])) best = i;
    taken[best] = 1;
    chosen[k] = static_cast<int32_t>(best);
  }
}

// `args`: a correction that is added to the scores for the selection only, or nothing.
ffi::Error route(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::RemainingArgs args,
                 ffi::ResultBuffer<ffi::S32> chosen, ffi::ResultBuffer<ffi::F32> weights,
                 bool softmax, bool renormalize, float scale) {
  if (logits.dimensions().size() != 2 || chosen->dimensions().size() != 2)
    return refuse("no matrices");
  const int64_t rows = logits.dimensions()[0], experts = logits.dimensions()[1];
  const int64_t count = chosen->dimensions()[1];
  if (!has_shape(*chosen, {rows, count}) || !has_shape(*weights, {rows, count}) || count > experts)
    return refuse("results do not fit the logits");
  const float* correction = nullptr;
  if (args.size() > 1) return refuse("too many arrays");
  if (args.size() == 1) {
    auto vector = args.get<ffi::Buffer<ffi::F32>>(0);
    if (vector.has_error()) return vector.error();
    if (!has_shape(*vector, {experts})) return refuse("a correction does not fit the logits");
    correction = vector->typed_data();
  }
  const RowwiseKernels& k = rowwise_kernels();
  parallel_rows(pool, rows, experts, [&](int64_t row) {
    static thread_local std::vector<float> scores, corrected;
    static thread_local std::vector<char> taken;
    scores.resize(experts), corrected.resize(experts), taken.resize(experts);
    const float* from = logits.typed_data() + row * experts;
    if (softmax)
      k.softmax(from, experts, scores.data());
    else
      k.activate(from, Activation::sigmoid, experts, scores.data());
    if (correction) k.add(scores.data(), correction, experts, corrected.data());
    int32_t* ids = chosen->typed_data() + row * count;
    float* to = weights->typed_data() + row * count;
    top_k(correction ? corrected.data() : scores.data(), taken, count, ids);
    float total = 0;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = scores[ids[i]];
      total = i ? total + to[i] : to[i];
    }
    if (total < 1e-20f) total = 1e-20f;  // sigmoids can all be 0
    for (int64_t i = 0; i < count; ++i) to[i] = (renormalize ? to[i] / total : to[i]) * scale;
  });
  return ffi::Error::Success();
}

// Sorts pairs of row and expert by expert, then by row. Results: row and expert of each sorted
// pair; each expert's begin, and the end; the sorted index of each original pair.
ffi::Error sort_by_expert(ffi::Buffer<ffi::S32> chosen, ffi::ResultBuffer<ffi::S32> row_of,
                          ffi::ResultBuffer<ffi::S32> expert_of, ffi::ResultBuffer<ffi::S32> begins,
                          ffi::ResultBuffer<ffi::S32> place_of) {
  if (chosen.dimensions().size() != 2 || begins->dimensions().size() != 1)
    return refuse("no matrix");
  const int64_t rows = chosen.dimensions()[0], count = chosen.dimensions()[1], pairs = rows * count;
  const int64_t experts = begins->dimensions()[0] - 1;
  if (!has_shape(*row_of, {pairs}) || !has_shape(*expert_of, {pairs}) ||
      !has_shape(*place_of, {pairs}) || experts < 0)
    return refuse("results do not fit");
  const int32_t* of = chosen.typed_data();
  int32_t* begin = begins->typed_data();
  std::fill_n(begin, experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) {
    if (of[i] < 0 || of[i] >= experts) return refuse("no such expert");
    ++begin[of[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) begin[e + 1] += begin[e];
  static thread_local std::vector<int32_t> next;
  next.assign(begin, begin + experts);
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t place = next[of[i]]++;
    row_of->typed_data()[place] = static_cast<int32_t>(i / count);
    expert_of->typed_data()[place] = of[i];
    place_of->typed_data()[i] = place;
  }
  return ffi::Error::Success();
}

// Each row's sum of its pairs' results times their weights, in order.
ffi::Error combine_experts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> results,
                           ffi::Buffer<ffi::S32> places, ffi::Buffer<ffi::F32> weights,
                           ffi::ResultBuffer<ffi::F32> y) {
  if (results.dimensions().size() != 2 || weights.dimensions().size() != 2)
    return refuse("no matrices");
  const int64_t pairs = results.dimensions()[0], size = results.dimensions()[1];
  const int64_t rows = weights.dimensions()[0], count = weights.dimensions()[1];
  if (rows * count != pairs || !has_shape(places, {pairs}) || !has_shape(*y, {rows, size}))
    return refuse("places, weights or the result do not fit");
  for (int64_t i = 0; i < pairs; ++i)
    if (places.typed_data()[i] < 0 || places.typed_data()[i] >= pairs)
      return refuse("no such place");
  parallel_rows(pool, rows, size * count, [&](int64_t row) {
    rowwise_kernels().weighted_sum(results.typed_data(), places.typed_data() + row * count,
                                   weights.typed_data() + row * count, count, size,
                                   y->typed_data() + row * size);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_route, jinfer::route, "softmax", "renormalize", "scale");
JINFER_HANDLER(jinfer_sort_by_expert, jinfer::sort_by_expert);
JINFER_HANDLER(jinfer_combine_experts, jinfer::combine_experts);
