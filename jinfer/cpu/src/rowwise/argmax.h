// Argmax of rows.
#pragma once

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "rowwise/rowwise.h"

namespace jinfer {

// Index of a row's largest number; the last index if there is a NaN.
inline int32_t index_of(const Argmax& found, int64_t size) {
  return static_cast<int32_t>(found.has_nan ? size - 1 : found.at);
}

// Argmax of each row. Rows may be cut for threads, which does not change the result.
inline void argmax_rows(ffi::ThreadPool& pool, const float* x, int64_t rows, int64_t size,
                        int32_t* at,
                        int32_t (*index)(const Argmax& found, int64_t size) = index_of) {
  constexpr int64_t CUT = 1 << 16, WORTH = 1 << 15;  // numbers of a piece; numbers per thread
  const int64_t cuts = (size + CUT - 1) / CUT, each = (size + cuts - 1) / cuts;
  std::vector<Argmax> found(rows * cuts);
  const RowwiseKernels& k = rowwise_kernels();
  parallel_for(pool, rows * cuts, 1 + rows * size / WORTH, [&](int64_t i) {
    const int64_t begin = std::min(i % cuts * each, size - 1);
    const int64_t end = std::min(begin + each, size);
    found[i] = k.argmax(x + i / cuts * size + begin, end - begin);
    found[i].at += begin;
  });
  for (int64_t row = 0; row < rows; ++row) {
    Argmax max_value = found[row * cuts];
    for (int64_t i = row * cuts + 1; i < (row + 1) * cuts; ++i) {
      const bool has_nan = max_value.has_nan || found[i].has_nan;
      if (found[i].value > max_value.value) max_value = found[i];
      max_value.has_nan = has_nan;
    }
    at[row] = index(max_value, size);
  }
}

}  // namespace jinfer
