#include "simd/vector_avx2.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avx2() { return kernels; }
