#include "dense_plain.h"

const jinfer::DenseKernels& jinfer::dense_portable() { return jinfer::kDense; }
