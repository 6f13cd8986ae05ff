#include "dense_plain.h"

const jinfer::DenseKernels& jinfer::dense_avx2() { return jinfer::kDense; }
