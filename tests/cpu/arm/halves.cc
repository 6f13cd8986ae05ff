// Every float16 as float32, one by one and in vectors, then the numbers of standard input as float16;
// and words turned, against plain loops.
#include <cstdlib>

#include "guarded.h"
#include "simd/simd.h"

using namespace jinfer;

int main() {
  static float alone[1 << 16], vectors[1 << 16];
  static Float16 all[1 << 16];
  for (int i = 0; i < 1 << 16; ++i) all[i].bits = i, alone[i] = from_f16(i);
  for (int i = 0; i < 1 << 16; i += LANES) store(vectors + i, load(all + i));
  std::fwrite(alone, sizeof alone, 1, stdout);
  std::fwrite(vectors, sizeof vectors, 1, stdout);

  float x;
  while (std::fread(&x, 4, 1, stdin) == 1) {
    const uint16_t bits = to_f16(x);
    std::fwrite(&bits, 2, 1, stdout);
  }

  for (int count = 1; count <= 8; ++count) {
    const uint32_t* from[LANES];
    for (int lane = 0; lane < LANES; ++lane) {
      uint32_t* words = reinterpret_cast<uint32_t*>(guarded(4 * count));
      for (int i = 0; i < count; ++i) words[i] = 100 * lane + i;
      from[lane] = words;
    }
    Words to[8];
    transpose_words(from, count, to);
    for (int i = 0; i < count; ++i)
      for (uint32_t lane = 0; lane < LANES; ++lane)
        if (to[i][lane] != 100 * lane + i) return EXIT_FAILURE;
  }
}
