// Expert selection: the matrix of a stack for each row of activations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jinfer {

// Numbered as in `selection` of matmul_call.py.
enum ExpertSelect : int64_t { kSingle = 0, kIndex = 1, kOffsets = 2 };

// Rows that use the same matrix of each stack.
struct Segment {
  int64_t index, begin, end;
};

// `values`: with kIndex the matrix of all rows; with kOffsets where each matrix's rows begin, and
// the end. Matrices without rows are left out.
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
