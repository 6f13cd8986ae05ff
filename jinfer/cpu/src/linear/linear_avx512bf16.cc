// AVX-512's kernels, with tables of bytes for pairs of weights.
#include "simd/vector_avx512.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avx512bf16() { return kernels; }
