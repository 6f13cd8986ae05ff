// Matmul work that threads share: the interface of quantized (linear_driver.h) and plain
// (dense_driver.h) products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/expert_select.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {

// Threads worth using for so many bytes of weights, counted once per 8 rows or so: a single thread
// reads kWorthThreads in about the time that waking another takes, and each further one needs
// kWorthThread.
inline int64_t threads_for(int64_t work, const ffi::ThreadPool& pool) {
  constexpr int64_t kWorthThreads = 96 << 10, kWorthThread = 32 << 10;
  return work < kWorthThreads ? 1 : std::min<int64_t>(most_threads(pool), work / kWorthThread);
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

}  // namespace jinfer
