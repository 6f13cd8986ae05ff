#include "dense/dense_f32.h"

const jinfer::DenseKernels& jinfer::dense_portable() { return jinfer::kDense; }
