// Attention schedule: stages of work that threads share, in a call of its own or fused with layers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {

struct CachedPlan;

// Plans of attention. Layers of a model with the same tokens and keys share one; memory is reused
// from step to step.
class PlanCache {
 public:
  PlanCache();
  ~PlanCache();

  // Forgets the plans of the previous step.
  void clear() { used_ = 0; }

  // The plan of a call; only the pointers of the call may change until it is done. Fails for a slot
  // that is not in the pool.
  ffi::ErrorOr<const CachedPlan*> of(const Call& call, const ffi::ThreadPool& pool);

 private:
  std::vector<std::unique_ptr<CachedPlan>> plans_;
  size_t used_ = 0;
};

// Three stages: writing new keys and values (unless done with the tiles), computing tiles or their
// splits, and merging splits and writing int8 keys, for later calls.
class AttentionWork {
 public:
  static constexpr int64_t kStages = 3;

  AttentionWork() = default;
  AttentionWork(const Call& call, const CachedPlan& cached);

  const Call& call() const { return call_; }
  int64_t chunks(int64_t stage) const { return chunks_[stage]; }
  int64_t threads() const;  // worth using
  int64_t buffer() const;   // floats of partial results, from the second stage to the third

  // Sets the pointers of matrices, and of room for partial results.
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
