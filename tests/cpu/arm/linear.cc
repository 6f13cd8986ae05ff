// Products with quantized matrices by the kernels of two sets of instructions: as many cases as
// standard input has, each as linear_case() of test_arm.py writes it. Of each, the product of the
// portable kernels and of those with dot products go to standard output, float32 [rows, outputs].
#include "linear/linear.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "guarded.h"

namespace {

using namespace jinfer;

void run(const LinearKernels& kernels, const Matrix& m, const float* x, int64_t rows, int digits) {
  const bool wide = m.bits == 16;
  const ActivationLayout form{m.columns(), m.G, m.affine() ? -1 : m.zero, m.block == 16 ? 2 : 1, wide ? 1 : digits,
                  false, wide};
  char* records = guarded(rows * form.row_bytes());
  for (int64_t row = 0; row < rows; ++row)
    kernels.prepare(x + row * m.inputs, m.inputs, form, records + row * form.row_bytes());
  std::vector<float> y(rows * m.outputs, NAN);
  kernels.multiply(m, {form, records}, rows, 0, m.tiles, y.data(), m.outputs);
  std::fwrite(y.data(), 4, y.size(), stdout);
}

}  // namespace

int main() {
  int64_t h[14];
  while (std::fread(h, sizeof h, 1, stdin) == 1) {
    Matrix m = {};
    m.bits = h[0], m.per_code = h[1], m.block = h[2], m.numbers = h[3], m.zero = h[4];
    m.R = h[5], m.G = h[6], m.tiles = h[7], m.superblocks = h[8], m.outputs = h[9], m.inputs = h[10];
    const bool two_level = h[11], coded = h[12];
    const int64_t rows = h[13], width = 32 * m.G * m.per_code, all = m.tiles * m.superblocks * m.R;
    m.words = read_array<uint32_t>(m.tiles * m.superblocks * m.bits * m.R * m.G);
    const int64_t numbers = all * width / m.block * m.numbers;
    m.scales = two_level ? static_cast<const void*>(read_array<int8_t>(numbers))
                         : read_array<uint16_t>(numbers);
    if (two_level) m.steps = read_array<uint16_t>(all * width / 256 * m.numbers);
    if (coded) m.codebook = read_array<uint8_t>(16);
    const float* x = read_array<float>(rows * m.inputs);
    for (const int digits : {1, 2, 3}) {
      run(linear_portable(), m, x, rows, digits);
      run(linear_neon(), m, x, rows, digits);
    }
  }
}
