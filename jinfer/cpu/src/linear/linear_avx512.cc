#include "simd/vector_avx512.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avx512() { return kernels; }
