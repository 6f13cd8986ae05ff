// Which instructions kernels may use. The numbers are those of ISAS in build.py.
#pragma once

namespace jinfer {

enum class Isa : int {
  portable = 0,
  avx2 = 1,    // AVX2, FMA, F16C, BMI2
  avx512 = 2,  // AVX-512 F, BW, VL, DQ, VNNI
};

// The best of this CPU that is not above the limit set by tests.
Isa isa();

}  // namespace jinfer
