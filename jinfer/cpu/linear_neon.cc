#include "vector_neon.h"

#include "linear_direct.h"
#include "linear_kernels.h"

const jinfer::LinearKernels& jinfer::linear_neon() { return kernels; }
