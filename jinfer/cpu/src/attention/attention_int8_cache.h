// Int8 keys of old splits, in addition to a cache of 16-bit numbers: attention_int8_numbers.h would
// otherwise round them again for each token.
//
// A block has its keys as bytes, the ranges within which its split was rounded with their digest,
// and the largest magnitude of its values. It is written once the split's keys are complete, and
// any write to the block clears the digest. So its content follows from the block's numbers and the
// ranges. Sequences that share a block may differ in the blocks after it: a split's int8 keys are
// used if all its blocks have the same ranges. jinfer/ops/attention/kv_cache.py has the same
// layout.
#pragma once

#include <cstring>

#include "attention/attention.h"

namespace jinfer {

// A block's int8 keys for one head: a header; columns [words][BLOCK_KEYS], as round_keys() writes
// them; the low and the high end of each number's range, as the keys are stored.
struct Int8Block {
  static constexpr int HEADER = 64;
  char* data;
  int dim;

  static int64_t columns_bytes(int64_t dim) { return (dim + 63) / 64 * 64 * BLOCK_KEYS; }
  static int64_t ranges_bytes(int64_t dim) { return (4 * dim + 63) / 64 * 64; }
  static int64_t bytes(int64_t dim) { return HEADER + columns_bytes(dim) + ranges_bytes(dim); }

  uint64_t* digest_word() const { return reinterpret_cast<uint64_t*>(data); }
  float* highest_value() const { return reinterpret_cast<float*>(data + 8); }
  int32_t* columns() const { return reinterpret_cast<int32_t*>(data + HEADER); }
  char* low() const { return data + HEADER + columns_bytes(dim); }
  char* high() const { return low() + 2 * dim; }

  // Of the ranges; 0: nothing is there.
  uint64_t digest() const { return __atomic_load_n(digest_word(), __ATOMIC_RELAXED); }
  void set() const {
    uint64_t all = 0, word;
    for (const char* from = low(); from < low() + 4 * dim; from += sizeof word) {
      memcpy(&word, from, sizeof word);
      all = (all ^ word) * 0x9e3779b97f4a7c15u;
      all ^= all >> 32;
    }
    __atomic_store_n(digest_word(), all ? all : 1, __ATOMIC_RELAXED);
  }
  // Memory without a digest is only read: the system commits it when it is written.
  void clear() const {
    if (digest()) __atomic_store_n(digest_word(), 0, __ATOMIC_RELAXED);
  }
};

// The int8 keys of a vector's block and head.
inline Int8Block int8_block(const Call& call, int64_t vector) {
  return {call.int8_keys + vector / BLOCK_KEYS * Int8Block::bytes(call.keys.dim), call.keys.dim};
}

}  // namespace jinfer
