#include "vector_avx512.h"

#include "linear_direct.h"
#include "linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avx512() { return kernels; }
