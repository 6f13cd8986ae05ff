#include "vector_avx2.h"

#include "linear_direct.h"
#include "linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_avx2() { return kernels; }
