// AVX-512's kernels, with tables of bytes for pairs of weights, and tiles for many rows.
#include "simd/vector_avx512.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

#include "linear/linear_amx.h"

const jinfer::LinearKernels& jinfer::linear_amx() { return kernels_with_amx; }
