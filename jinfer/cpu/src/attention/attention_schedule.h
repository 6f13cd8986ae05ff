// Attention as work in stages that threads share: a call of its own, or a part of a chain.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {

struct CachedPlan;

// How attentions are cut into pieces. Those of a model's layers that have the same tokens and see
// the same keys are cut same_plan, once; memory is kept from step to step.
class PlanCache {
 public:
  PlanCache();
  ~PlanCache();

  // Forgets those of the step before.
  void clear() { used_ = 0; }

  // Of a call, which stays the same until it is done but for where queries, new keys and values,
  // results and the pool stand. An error says which place is not in the pool.
  ffi::ErrorOr<const CachedPlan*> of(const Call& call, const ffi::ThreadPool& pool);

 private:
  std::vector<std::unique_ptr<CachedPlan>> plans_;
  size_t used_ = 0;
};

// Three stages: new keys and values are written, unless who computes a tile does it; tiles or parts
// of them are computed; parts are merged.
class AttentionWork {
 public:
  static constexpr int64_t kStages = 3;

  AttentionWork() = default;
  AttentionWork(const Call& call, const CachedPlan& cached);

  const Call& call() const { return call_; }
  int64_t chunks(int64_t stage) const { return chunks_[stage]; }
  int64_t threads() const;  // that are worth it
  int64_t room() const;     // floats of partial results, from the second stage to the third

  // Where matrices stand, and room for partial results.
  void bind(const void* q, const void* k, const void* v, void* out, float* partial);
  void run(int64_t stage, int64_t chunk) const;

 private:
  void write(int64_t token, int64_t head) const;

  Call call_{};
  const CachedPlan* planned_ = nullptr;
  float* partial_ = nullptr;
  int64_t chunks_[kStages] = {};
};

}  // namespace jinfer
