#include "dense_kernels.h"

const jinfer::DenseKernels& jinfer::dense_portable() { return jinfer::kernels; }
