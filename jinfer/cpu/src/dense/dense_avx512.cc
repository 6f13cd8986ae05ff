#include "dense/dense_f32.h"

const jinfer::DenseKernels& jinfer::dense_avx512() { return jinfer::kDense; }
