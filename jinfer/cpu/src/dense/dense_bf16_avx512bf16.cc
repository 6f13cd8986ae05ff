// Matmul of bfloat16 with AVX-512 BF16 dot products: one instruction adds two products to a float32
// sum.
#include "dense/dense_gemm.h"

namespace jinfer {
namespace {

// Two neighbouring numbers. A vector of pairs is passed as Floats, as bits.
struct Pair {
  uint32_t both;
};

inline Floats load(const Pair* from) { return load(reinterpret_cast<const float*>(from)); }

template <>
struct MulAdd<Pair> {
  using Factor = Pair;
  static Floats broadcast(const float* x) {
    int32_t both;
    memcpy(&both, x, sizeof both);
    return (Floats)_mm512_set1_epi32(both);
  }
  static Floats add(Floats sum, Floats x, Floats weight) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
  }
};

// Rounds to nearest even; denormals become 0.
void round(const float* x, int64_t inputs, float* pairs) {
  char* to = reinterpret_cast<char*>(pairs);
  for (int64_t i = 0; i < inputs; i += 2 * LANES) {
    const Floats low = load_padded(x + i, inputs - i);
    const Floats high = load_padded(x + i + LANES, inputs - i - LANES);
    const auto rounded = _mm512_cvtne2ps_pbh(high, low);
    memcpy(to + 2 * i, &rounded, 2 * std::min<int64_t>(2 * LANES, inputs - i));
  }
}

void multiply_gemv(const DenseMatrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                   float* y, int64_t stride) {
  gemv<Pair>(w, reinterpret_cast<const Pair*>(x), rows, begin, end, y, stride);
}

const DenseBf16Pairs pairs = {{LANES, WIDTH, GEMM_MIN_ROWS, multiply_gemv, pack, gemm<Pair>},
                              round};

}  // namespace
}  // namespace jinfer

const jinfer::DenseBf16Pairs* jinfer::dense_bf16_avx512bf16() { return &jinfer::pairs; }
