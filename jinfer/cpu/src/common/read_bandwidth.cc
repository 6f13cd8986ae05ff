// Reading, and nothing else: what tools compare products' reading of weights with.
#include <cstdint>
#include <cstring>

// A word of each line, as memory gives whole ones.
extern "C" __attribute__((visibility("default"))) uint64_t jinfer_read_bandwidth(const char* from,
                                                                       int64_t bytes,
                                                                       int64_t ahead) {
  uint64_t any = 0;
  for (int64_t at = 0; at + 64 <= bytes; at += 64) {
    if (ahead) __builtin_prefetch(from + at + ahead, 0, 2);
    uint64_t word;
    std::memcpy(&word, from + at, sizeof word);
    any |= word;
  }
  return any;
}
