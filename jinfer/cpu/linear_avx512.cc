#include "vector_avx512.h"

#include "linear_direct.h"
#include "linear_kernels.h"

const jinfer::Kernels& jinfer::linear_avx512() { return kernels; }
