// Memory bandwidth probe: reads memory as a GEMV reads its weights.
#include <cstdint>
#include <cstring>

// ORs one word of each cache line.
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
