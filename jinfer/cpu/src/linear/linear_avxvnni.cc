// AVX2's kernels with AVX-VNNI's dot products. Compilers that do not know these leave AVX2's.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avxvnni")  // of which g++ 12 defines no macro
#define JINFER_AVXVNNI
#endif
#include "simd/vector_avx2.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avxvnni() { return kernels; }
