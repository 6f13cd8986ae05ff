// Which matrix of a stack rows of activations are multiplied with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jinfer {

// The numbers are those of `selection` in quantized_matmul.py.
enum ExpertSelect : int64_t { kSingle = 0, kIndex = 1, kOffsets = 2 };

// Rows that are multiplied with one matrix of each stack.
struct Segment {
  int64_t index, begin, end;
};

// `values`: of kIndex the matrix for all rows; of kOffsets where the rows of each matrix begin, and
// at last where they end. Matrices without rows are left out.
inline std::vector<Segment> segments_of(int64_t select, const int32_t* values, int64_t count,
                                        int64_t rows) {
  if (select == kSingle) return {{0, 0, rows}};
  if (select == kIndex) return {{count > 0 ? values[0] : -1, 0, rows}};
  std::vector<Segment> segments;
  for (int64_t i = 0; i + 1 < count; ++i) {
    const int64_t begin = std::max<int64_t>(values[i], 0);
    const int64_t end = std::min<int64_t>(values[i + 1], rows);
    if (end > begin) segments.push_back({i, begin, end});
  }
  return segments;
}

}  // namespace jinfer
