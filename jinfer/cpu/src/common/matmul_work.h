// Matmul work that threads share: the interface of quantized (linear_driver.h) and plain
// (dense_driver.h) products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/buffer_checks.h"
#include "common/expert_select.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {

// Threads worth using for so many bytes of weights, counted once per 8 rows or so: a single thread
// reads kWorthThreads in about the time that waking another takes, and each further one needs
// kWorthThread.
inline int64_t threads_for(int64_t work, const ffi::ThreadPool& pool) {
  constexpr int64_t kWorthThreads = 96 << 10, kWorthThread = 32 << 10;
  return work < kWorthThreads ? 1 : std::min<int64_t>(max_threads(pool), work / kWorthThread);
}

// Use: partition, set outputs and memory for prepared rows, prepare the rows, then run each chunk
// once, on any thread. Reading and partitioning again reuses the memory.
class MatmulWork {
 public:
  virtual ~MatmulWork() = default;

  virtual size_t results() const = 0;
  virtual int64_t outputs(size_t result) const = 0;
  virtual void set_output(size_t result, float* y) = 0;  // [rows, outputs]

  // Partitions the work into chunks; neighbouring chunks are neighbours in memory.
  virtual void partition(const Segment* segments, size_t count, const ffi::ThreadPool& pool) = 0;
  int64_t chunks = 0, threads = 1;  // worth using

  // Bytes of a row of activations prepared in a form; 0: the form is not needed.
  virtual size_t row_bytes(size_t form) const = 0;
  std::vector<char*> rows;  // prepared, per form

  virtual void prepare(const float* x, int64_t row) const = 0;
  virtual void run(int64_t chunk) const = 0;
};

// The segments of a handler's rows; `next`: its next argument, the selection unless there is none.
inline ffi::ErrorOr<std::vector<Segment>> read_segments(const ffi::RemainingArgs& args,
                                                        int64_t select, int64_t rows,
                                                        size_t& next) {
  if (select == kSingle) return segments_of(select, nullptr, 0, rows);
  const auto chosen = args.get<ffi::Buffer<ffi::S32>>(next++);
  if (chosen.has_error()) return chosen.error();
  return segments_of(select, chosen->typed_data(), chosen->element_count(), rows);
}

// Binds a handler's results to the work's.
inline ffi::Error bind_outputs(MatmulWork& work, ffi::RemainingRets& rets, int64_t rows) {
  if (rets.size() != work.results()) return refuse("wrong number of results");
  for (size_t t = 0; t < work.results(); ++t) {
    auto y = rets.get<ffi::Buffer<ffi::F32>>(t);
    if (y.has_error()) return y.error();
    if (!has_shape(**y, {rows, work.outputs(t)})) return refuse("a result's shape does not fit");
    work.set_output(t, (*y)->typed_data());
  }
  return ffi::Error::Success();
}

}  // namespace jinfer
