#include "rowwise/rowwise_kernels.h"

const jinfer::RowKernels& jinfer::rowwise_avx512() { return jinfer::kRows; }
