// Rows times matrices, as work that threads share: what products with quantized matrices
// (linear_driver.h) and with plain ones (dense_driver.h) look like to who lets them run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/expert_select.h"
#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {

// Threads that are worth it for so many bytes of weights, counted once for about 8 rows: one goes
// through kWorthThreads about as fast as another one is woken, and each more is to have kWorthThread.
inline int64_t threads_for(int64_t work, const ffi::ThreadPool& pool) {
  constexpr int64_t kWorthThreads = 96 << 10, kWorthThread = 32 << 10;
  return work < kWorthThreads ? 1 : std::min<int64_t>(most_threads(pool), work / kWorthThread);
}

// It is cut, then given memory for rows in the forms that it wants and for its results; the rows are
// prepared, and each chunk is run once, by any thread. It may be read and cut anew, and keeps the
// memory that it has.
class MatmulWork {
 public:
  virtual ~MatmulWork() = default;

  virtual size_t results() const = 0;
  virtual int64_t outputs(size_t result) const = 0;
  virtual void set_output(size_t result, float* y) = 0;  // [rows, outputs]

  // Into chunks: those of neighbours are neighbours in memory.
  virtual void partition(const Segment* segments, size_t count, const ffi::ThreadPool& pool) = 0;
  int64_t chunks = 0, threads = 1;  // that are worth it

  // Of a row of activations in each form, in bytes; 0: this one is not wanted after all.
  virtual size_t row_bytes(size_t form) const = 0;
  std::vector<char*> rows;  // in each form

  virtual void prepare(const float* x, int64_t row) const = 0;
  virtual void run(int64_t chunk) const = 0;
};

}  // namespace jinfer
