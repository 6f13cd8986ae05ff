// AVX-512 kernels with VBMI tables for 3.5 bits.
#include "simd/vector_avx512.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avx512bf16() { return kernels; }
