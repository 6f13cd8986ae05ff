#include "dense/dense_f32.h"

const jinfer::DenseKernels& jinfer::dense_avx2() { return jinfer::kDense; }
