// Attention: validates the cache slots that a call reads and writes.
#pragma once

#include <algorithm>
#include <climits>
#include <string>

#include "attention/attention.h"
#include "common/buffer_checks.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

namespace ffi = xla::ffi;

// Checks that every block in use is one of the pool's.
inline ffi::Error check_slots(const Call& call) {
  auto within = [&](int64_t row, int64_t entry) {
    const int32_t block = call.tables[row * call.width + entry];
    return (block >= 0 && block < call.blocks) || (call.sums && block == NOT_LOCAL);
  };
  auto outside = [](int64_t t, const char* what) {
    return refuse("token " + std::to_string(t) + " " + what);
  };
  // Entries of the current sequence that are checked already.
  int64_t row = -1, first = 0, end = 0;
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.rows[t] < 0) continue;
    if (call.rows[t] != row) row = call.rows[t], first = end = 0;
    if (call.written) {
      const int64_t entry = call.positions[t] / call.size;
      if (call.positions[t] < 0 || entry >= call.width)
        return outside(t, "has no place in its table");
      if (!within(row, entry)) return outside(t, "is in a block that is not in the pool");
    }
    int from, to;
    call.seen(t, &from, &to);
    if (from >= to) continue;
    const int64_t low = from / call.size, high = (to - 1) / call.size + 1;
    if (low > end || high < first) first = end = low;
    for (int64_t entry = low; entry < high; ++entry) {
      if (entry >= first && entry < end)
        entry = end - 1;
      else if (!within(row, entry))
        return outside(t, "sees a block that is not in the pool");
    }
    first = std::min(first, low), end = std::max(end, high);
  }
  return ffi::Error::Success();
}

// Whether no token reads or writes a block that another token writes, as when each is the next one
// of a different sequence. Then the thread that computes a tile may write its tokens. False for
// many tokens, to save the check.
inline bool writes_are_disjoint(const Call& call) {
  constexpr int MOST = 64, TOGETHER = 16;
  constexpr int32_t NOWHERE = INT_MIN;
  if (call.tokens > MOST) return false;
  int32_t written[MOST];
  std::fill(written, written + MOST, NOWHERE);
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.rows[t] < 0) continue;
    const int32_t block = call.block(call.rows[t], call.positions[t]);
    if (block != NOT_LOCAL) written[t] = block;
  }
  auto writers = [&](int32_t block) {
    int count = 0;
    for (int64_t t = 0; t < call.tokens; t += TOGETHER)
      for (int i = 0; i < TOGETHER; ++i) count += written[t + i] == block;
    return count;
  };
  for (int64_t t = 0; t < call.tokens; ++t) {
    if (call.rows[t] < 0) continue;
    if (written[t] != NOWHERE && writers(written[t]) > 1) return false;
    int first, end;
    call.seen(t, &first, &end);
    if (first >= end) continue;
    const int32_t* table = call.tables + call.rows[t] * call.width;
    for (int64_t entry = first / call.size; entry <= (end - 1) / call.size; ++entry)
      if (table[entry] != written[t] && writers(table[entry]) > 0) return false;
  }
  return true;
}

}  // namespace
}  // namespace jinfer
