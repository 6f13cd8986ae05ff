// Parallel loop over independent rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

// Calls work(row) for each row; `size`: numbers of a row.
template <class Work>
void parallel_rows(xla::ffi::ThreadPool& pool, int64_t rows, int64_t size, const Work& work) {
  constexpr int64_t kChunk = 1 << 15;  // numbers that make another thread worthwhile
  const int64_t each = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, size));
  const int64_t chunks = (rows + each - 1) / each;
  parallel_for(pool, chunks, chunks, [&](int64_t chunk) {
    const int64_t end = std::min(rows, (chunk + 1) * each);
    for (int64_t row = chunk * each; row < end; ++row) work(row);
  });
}

}  // namespace
}  // namespace jinfer
