// AVX-512 kernels with VBMI tables for 3.5 bits, and AMX tiles for more rows.
#include "simd/vector_avx512.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

#include "linear/linear_bf16_tiles.h"

const jinfer::LinearKernels& jinfer::linear_amx() { return kernels_with_amx; }
