#include "rows_kernels.h"

const jinfer::RowKernels& jinfer::rows_avx512() { return jinfer::kRows; }
