// AVX-512's kernels, with tables of bytes for pairs of weights, and tiles for many rows.
#include "vector_avx512.h"

#include "linear_direct.h"
#include "linear_kernels.h"
#include "linear_tiles.h"

const jinfer::LinearKernels& jinfer::linear_amx() { return kernels_and_tiles; }
