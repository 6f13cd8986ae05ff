#include "dense_plain.h"

const jinfer::DenseKernels& jinfer::dense_avx512() { return jinfer::kDense; }
