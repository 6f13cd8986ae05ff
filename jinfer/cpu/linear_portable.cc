#define UNROLL  // it would make the code long and no faster

#include "vector_portable.h"

#include "linear_kernels.h"

const jinfer::Kernels& jinfer::portable_kernels() { return kernels; }
