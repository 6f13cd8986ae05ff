// AVX-512's kernels, with tables of bytes for pairs of weights.
#include "vector_avx512.h"

#include "linear_direct.h"
#include "linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avx512bf16() { return kernels; }
