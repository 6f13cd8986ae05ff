#include "simd/vector_neon.h"

#include "linear/linear_gemv.h"
#include "linear/linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_neon() { return kernels; }
