#include "rowwise/rowwise_kernels.h"

const jinfer::RowKernels& jinfer::rowwise_avx2() { return jinfer::kRows; }
