#include "rows_kernels.h"

const jinfer::RowKernels& jinfer::rows_avx2() { return jinfer::kRows; }
