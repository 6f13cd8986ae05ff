// AVX2 kernels with AVX-VNNI dot products; plain AVX2 where the compiler lacks AVX-VNNI.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avxvnni")  // g++ 12 defines no macro for it
#define JINFER_AVXVNNI
#endif
#include "simd/vector_avx2.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avxvnni() { return kernels; }
